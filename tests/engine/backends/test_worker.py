"""Whether a worker answers: real sockets, made-up answers."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine.backends import worker as module
from engine.backends.load import Costs
from engine.backends.worker import Worker
from engine.config.backend_address import Address


class Server:
    """Hangs as long as `silent`."""

    def __init__(self) -> None:
        self.silent = False
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics), web.get("/v1/models", self.models)])
        app.add_routes([web.post("/v1/completions", self.completions)])
        self.http = TestServer(app)

    async def metrics(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        return web.Response(text='vllm:num_requests_running{engine="0"} 3.0\n')

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    async def completions(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        return web.Response(text="data: [DONE]\n")


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.005)


@pytest.fixture
async def watched(monkeypatch):
    for name, value in (("POLL_S", 0.02), ("AWAY_POLL_S", 0.02), ("ANSWER_S", 0.1)):
        monkeypatch.setattr(module, name, value)
    server, lost = Server(), []
    await server.http.start_server()
    async with aiohttp.ClientSession() as session:
        address = Address(str(server.http.make_url("")).rstrip("/"))
        one = Worker(address, b"r" * 16, session, lost.append, Costs())
        one.start()
        yield one, server, lost
        await one.close()
    await server.http.close()


async def test_a_silent_worker_is_given_up_and_comes_back(watched):
    one, server, lost = watched
    await one.seen()
    assert one.away is None and one.model == "theirs" and one.load.running == 3
    server.silent = True
    await until(lambda: one.away is not None)
    assert lost == [one.name]
    server.silent = False
    await until(lambda: one.away is None)
    assert lost == [one.name]


async def test_a_worker_that_is_gone(watched):
    one, server, lost = watched
    await one.seen()
    await server.http.close()
    await until(lambda: one.away is not None)
    assert lost == [one.name]


async def test_a_question_to_a_worker_that_is_given_up_ends(watched):
    """One that hangs before its first byte: the question would last until the deadline of the request."""
    one, server, lost = watched
    await one.seen()
    (await one.ask({})).close()
    server.silent = True
    with pytest.raises(aiohttp.ClientError, match="does not answer"):
        async with asyncio.timeout(20):
            await one.ask({})
    assert lost == [one.name]


async def test_a_question_that_the_caller_gives_up_is_cancelled(watched):
    one, server, _ = watched
    await one.seen()
    server.silent = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await one.ask({})

"""The proxy of a pair, in front of servers that record what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lab.foreign.vllm.pair_proxy import Pair, application

ENGINE = {"0": {"engine_id": "engine-7", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}
BODY = {"model": "m", "prompt": [1, 2], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}


class Fakes:
    """A prefilling vLLM with its bootstrap server, and a decoding one. `refuses`: the prefilling one answers 400."""

    def __init__(self) -> None:
        self.refuses = False
        self.prefilled: list[dict] = []
        self.decoded: list[dict] = []
        self._saved = asyncio.Event()

    async def query(self, request: web.Request) -> web.Response:
        return web.json_response(ENGINE)

    async def prefill(self, request: web.Request) -> web.Response:
        self.prefilled.append(await request.json())
        if self.refuses:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self._saved.set()
        return web.json_response({"choices": []})

    async def decode(self, request: web.Request) -> web.StreamResponse:
        self.decoded.append(await request.json())
        await self._saved.wait()  # as a vLLM that waits for the KV of the other one
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in (b"data: one\n\n", b"data: two\n\n"):
            await answer.write(piece)
        return answer

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"asked": request.path_qs})


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[Fakes, TestClient, str]]:
    fakes, first, second = Fakes(), web.Application(), web.Application()
    first.router.add_get("/query", fakes.query)
    first.router.add_post("/v1/completions", fakes.prefill)
    second.router.add_post("/v1/completions", fakes.decode)
    second.router.add_get("/v1/models", fakes.models)
    async with TestServer(first) as prefill, TestServer(second) as decode:
        at = str(prefill.make_url("")).rstrip("/")
        async with TestClient(TestServer(application(Pair(at, at, str(decode.make_url("")).rstrip("/"))))) as client:
            yield fakes, client, at


async def test_both_get_the_request_at_the_same_time_and_the_second_answers():
    async with proxy() as (fakes, client, bootstrap):
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status, await answer.read()) == (200, b"data: one\n\ndata: two\n\n")
        models = await client.get("/v1/models?a=b")
        assert await models.json() == {"asked": "/v1/models?a=b"}
    (first,), (then,) = fakes.prefilled, fakes.decoded
    transfer_id = first["kv_transfer_params"]["transfer_id"]
    assert first == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
    }
    fetch = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "engine-7"}
    assert then == BODY | {
        "kv_transfer_params": fetch | {"remote_bootstrap_addr": bootstrap, "transfer_id": transfer_id}
    }


async def test_a_refusal_of_the_first_goes_to_the_client():
    async with proxy() as (fakes, client, _):
        fakes.refuses = True
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status, (await answer.json())["error"]["message"]) == (400, "too long")


@pytest.mark.parametrize(("data", "status"), [(b"{", 400), (b"{}", 502)])
async def test_a_bad_body_and_a_pair_that_is_away_are_errors(data, status, unused_tcp_port):
    away = f"http://127.0.0.1:{unused_tcp_port}"
    async with TestClient(TestServer(application(Pair(away, away, away)))) as client:
        answer = await client.post("/v1/completions", data=data)
        assert answer.status == status
        assert "message" in (await answer.json())["error"]

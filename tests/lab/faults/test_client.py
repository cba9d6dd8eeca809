"""The client that does not give up, and the load made of such clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web

from lab.faults import client
from lab.faults.client import REFUSED_S, Load, Stream, stream

TOKENS = list(range(50, 60))
SEEN = web.AppKey("seen", list)
DEAD = "http://127.0.0.1:9"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, seen: list) -> AsyncIterator[str]:
    """The URL of a node that answers like this."""
    app = web.Application()
    app[SEEN] = seen
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def send(response: web.StreamResponse, tokens: list[int]) -> None:
    for token in tokens:
        event = {"choices": [{"token_ids": [token], "text": ""}]}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


async def every_third(request: web.Request) -> web.StreamResponse:
    """Ten tokens from X-Resume-From on; the connection breaks after every third."""
    begin = int(request.headers.get("X-Resume-From", 0))
    request.app[SEEN].append((request.headers["X-Request-Id"], begin))
    response = web.StreamResponse()
    await response.prepare(request)
    await send(response, TOKENS[begin : begin + 3])
    if begin + 3 >= len(TOKENS):
        await response.write(b"data: [DONE]\n\n")
        return response
    assert request.transport is not None
    request.transport.abort()
    return response


def test_a_request_is_under_way_from_its_first_token_on():
    load = Load(["http://x"], [{}], "n")
    load.requests = [(0, Stream(tokens=TOKENS[:n], error=error)) for n, error in ((0, ""), (1, ""), (5, ""), (3, "e"))]
    assert [load.under_way(most) for most in (0, 1, 4, 5)] == [0, 1, 1, 2]


async def whole(request: web.Request) -> web.StreamResponse:
    """All tokens; `seen` has each request's body."""
    request.app[SEEN].append(await request.json())
    response = web.StreamResponse()
    await response.prepare(request)
    await send(response, TOKENS)
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_every_token_comes_once_whatever_breaks():
    into, seen = Stream(), []
    async with served(every_third, seen) as url, aiohttp.ClientSession() as session:
        await stream(session, [DEAD, url], {}, "r", into)
    assert into.tokens == TOKENS and into.error == ""
    assert seen[0] == ("r", 0) and [begin for _, begin in seen] == sorted({begin for _, begin in seen})
    assert into.reconnects >= 4


async def test_an_error_of_the_api_ends_it():
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=503)

    into = Stream()
    async with served(refuse, []) as url, aiohttp.ClientSession() as session:
        await stream(session, [DEAD, url], {}, "r", into)
    assert into.error.startswith("503") and into.tokens == []


async def test_clients_send_their_bodies_in_turn_until_the_block_ends():
    seen: list[dict] = []
    given = [{"prompt": [number]} for number in range(3)]
    async with served(whole, seen) as url, Load([url], given, "load", clients=2, salted=True) as load:
        await load.until(lambda: load.with_tokens(len(TOKENS)) >= 7)
    assert [body for body, _ in load.requests[:2]] == [0, 1]
    assert {body for body, _ in load.requests} == {0, 1, 2}
    assert all(one.tokens == TOKENS for one in load.streams), "the end of the block waits for the requests under way"
    assert len({body["cache_salt"] for body in seen}) == len(seen) == len(load.requests)


async def test_the_usage_tells_what_an_answer_did_without():
    async def lacking(request: web.Request) -> web.StreamResponse:
        wants_usage = (await request.json())["stream_options"]["include_usage"]
        response = web.StreamResponse()
        await response.prepare(request)
        await send(response, TOKENS)
        usage = {"completion_tokens": len(TOKENS), "dropped_experts": 7}
        await response.write(
            b"data: " + orjson.dumps({"choices": [], "usage": usage if wants_usage else None}) + b"\n\n"
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    for handler, dropped in ((lacking, 7), (whole, 0)):
        into = Stream()
        async with served(handler, []) as url, aiohttp.ClientSession() as session:
            await stream(session, [url], {}, "r", into)
        assert into.tokens == TOKENS and into.error == "" and into.dropped_experts == dropped


async def test_a_client_pauses_after_an_error(monkeypatch):
    pauses, sleep = list[float](), asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=503)

    monkeypatch.setattr("lab.faults.client.asyncio.sleep", noted)
    async with served(refuse, []) as url, Load([url], [{}], "load") as load:
        await load.until(lambda: len(load.requests) == 3)
    assert pauses.count(REFUSED_S) == 2 and all(one.error for one in load.streams)


async def test_a_load_of_one_request_per_client():
    seen: list[dict] = []
    async with served(whole, seen) as url, Load([url], [{}, {}, {}], "load", once=True) as load:
        await load.until(lambda: False)  # ends with the clients
    assert [body for body, _ in load.requests] == [0, 1, 2] and len(seen) == 3


async def test_in_turn_nothing_is_sent_again():
    seen: list[dict] = []
    async with served(whole, seen) as url, Load([url, DEAD], [{}], "load", in_turn=True) as load:
        await load.until(lambda: len(load.requests) >= 4)
    good, bad = load.streams[::2], load.streams[1::2]
    assert all(one.tokens == TOKENS for one in good) and len(seen) == len(good)
    assert all("in 1 attempts" in one.error and not one.reconnects for one in bad) and bad


async def test_a_refusal_after_the_load_has_stopped_to_insist_is_an_error():
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "later"}}, status=503)

    async with served(refuse, []) as url, Load([url], [{}], "load", insists=True) as load:
        await load.until(lambda: load.refused == 1)
        load.insists = False
        await load.until(lambda: any(one.error for one in load.streams))
    assert load.refused == 1 and all(one.error.startswith("503") for one in load.streams)


async def test_a_load_without_tokens_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(client, "STALLED_S", 0.05)

    waited = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        await waited.wait()
        return web.Response()

    async with served(silent, []) as url:
        with pytest.raises(TimeoutError, match="no request has got a token"):
            async with Load([url], [{}], "load") as load:
                await load.until(lambda: load.with_tokens(1) > 0)
        waited.set()


async def test_a_refused_request_is_counted_and_sent_again():
    async def first_refused(request: web.Request) -> web.StreamResponse:
        request.app[SEEN].append(request.headers["X-Request-Id"])
        if len(request.app[SEEN]) == 1:
            return web.json_response({"error": {"message": "later"}}, status=503)
        request.app[SEEN].pop()
        return await whole(request)

    async with served(first_refused, []) as url, Load([url], [{}], "load", insists=True) as load:
        await load.until(lambda: load.with_tokens(len(TOKENS)) >= 1)
    assert load.refused == 1
    assert all(one.tokens == TOKENS and not one.error for one in load.streams)

"""The client that does not give up, and what the benchmark calls wrong."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from aiohttp import web

from lab.faults.checks import differences, pause_rows
from lab.faults.client import Stream, stream
from lab.faults.kill_roles import SHAPES
from lab.launch.nodes import parse_nodes

TOKENS = list(range(50, 60))


async def answer(request: web.Request) -> web.StreamResponse:
    """Ten tokens from X-Resume-From on; the connection breaks after every third."""
    begin = int(request.headers.get("X-Resume-From", 0))
    request.app["seen"].append((request.headers["X-Request-Id"], begin))
    response = web.StreamResponse()
    await response.prepare(request)
    for token in TOKENS[begin : begin + 3]:
        event = {"choices": [{"token_ids": [token], "text": ""}]}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    if begin + 3 >= len(TOKENS):
        await response.write(b"data: [DONE]\n\n")
        return response
    assert request.transport is not None
    request.transport.abort()
    return response


async def served(handler, body, into: Stream, seen: list) -> None:
    app = web.Application()
    app["seen"] = seen
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession() as session:
            await stream(session, ["http://127.0.0.1:9", url], body, "r", into)
    finally:
        await runner.cleanup()


async def test_every_token_comes_once_whatever_breaks():
    into, seen = Stream(), []
    await served(answer, {}, into, seen)
    assert into.tokens == TOKENS and into.error == ""
    assert seen[0] == ("r", 0) and [begin for _, begin in seen] == sorted({begin for _, begin in seen})
    assert into.reconnects >= 4


async def test_an_error_of_the_api_ends_it():
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=503)

    into = Stream()
    await served(refuse, {}, into, [])
    assert into.error.startswith("503") and into.tokens == []


def test_what_is_wrong():
    calm = [Stream(tokens=[1, 2, 3]), Stream(tokens=[4])]
    assert differences("decode killed", calm, [Stream(tokens=[1, 2, 3]), Stream(tokens=[4])]) == []
    wrong = differences("decode killed", calm, [Stream(tokens=[1, 9, 3]), Stream(error="503: no")])
    assert "differs from token 1" in wrong[0] and "stream 1 failed: 503" in wrong[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_clients_reach_a_living_node_whoever_is_killed(shape):
    names = {name for name, _ in parse_nodes(shape.nodes)}
    for role, victim in shape.victims.items():
        first, other = shape.doors_of(role)
        assert {victim, first, other} <= names
        assert (victim == first) == (role == "acceptor")
        assert victim not in (first, other) or victim != (other if role == "acceptor" else first)


def test_pauses_count_from_the_death_on():
    streams = [Stream(at=[0.0, 5.0, 5.1, 5.4]), Stream(at=[4.0, 4.1])]
    rows = {row.metric: row.ours for row in pause_rows("decode killed", streams, 5.05)}
    assert rows["streams cut"] == 1.0 and abs(rows["longest pause p99"] - 0.3) < 1e-9

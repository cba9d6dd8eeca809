"""Greedy completions of servers that answer token ids, from a server that says what vLLM says."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lab.bench.common.client import Unreachable, open_session
from lab.foreign.common.completions import complete

USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.fixture
async def server():
    """It answers the tokens 10, 11 and 12 in two events; a request of 99 tokens fails in the stream."""
    asked: list[dict] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":  # as vLLM's server
            return web.json_response({"error": {"message": "Unsupported Media Type"}}, status=400)
        body = await request.json()
        asked.append(body)
        if body["max_tokens"] == 0:
            return web.json_response({"error": {"message": "max_tokens must be at least 1"}}, status=400)
        events: list[dict] = [{"choices": [{"text": "", "token_ids": []}]}]
        events += [{"choices": [{"text": "a", "token_ids": [10]}]}, {"choices": [{"text": "b", "token_ids": [11, 12]}]}]
        events += [{"choices": [], "usage": USAGE}]
        if body["max_tokens"] == 99:
            events[2] = {"error": {"message": "the engine died"}}
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for event in events:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    server = TestServer(app)
    await server.start_server()
    server.asked = asked
    yield server
    await server.close()


async def test_an_answer_has_tokens_times_and_the_cached_part_of_the_prompt(server):
    async with open_session() as session:
        answer = await complete(session, str(server.make_url("")).rstrip("/"), [1, 2, 3], 3, {"kv_transfer_params": {}})
    assert (answer.tokens, answer.cached_tokens) == ([10, 11, 12], 2)
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert server.asked[0]["prompt"] == [1, 2, 3] and server.asked[0]["kv_transfer_params"] == {}
    assert (
        server.asked[0]["temperature"] == 0.0 and server.asked[0]["ignore_eos"] and server.asked[0]["return_token_ids"]
    )


@pytest.mark.parametrize(
    ("max_tokens", "words"), [(0, "400.*at least 1"), (99, "the engine died"), (4, "3 token ids and not 4")]
)
async def test_a_failure_has_the_servers_words(server, max_tokens, words):
    async with open_session() as session:
        with pytest.raises(Unreachable, match=words):
            await complete(session, str(server.make_url("")).rstrip("/"), [1, 2, 3], max_tokens)

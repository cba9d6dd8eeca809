"""The session of a request: header and body, and what is no session."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.net.fake_frontend import FakeFrontend, serving

COMPLETION = ("/v1/completions", {"prompt": "ab", "max_tokens": 2})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
RESPONSE = ("/v1/responses", {"input": "hi", "max_output_tokens": 2})


async def sessions(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """The status, and the session of each call of the engine."""
    frontend = FakeFrontend()
    async with (
        serving(frontend) as url,
        aiohttp.ClientSession(url) as client,
        client.post(path, json=body, headers=headers) as response,
    ):
        await response.read()
        return response.status, [call["session"] for call in frontend.calls]


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT, RESPONSE])
async def test_the_header_names_the_session_on_every_route(path, body):
    assert await sessions(path, body, {"X-Session-Id": "agent-7"}) == (200, ["agent-7"])
    assert await sessions(path, body) == (200, [""])


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
async def test_the_body_names_it_too_and_the_header_overrides_it(path, body):
    assert await sessions(path, body | {"session_id": "talk 1"}) == (200, ["talk 1"])
    assert await sessions(path, body | {"session_id": "talk 1"}, {"X-Session-Id": "x"}) == (200, ["x"])


async def test_several_answers_to_a_prompt_are_no_turns():
    path, body = COMPLETION
    assert await sessions(path, body | {"n": 2}, {"X-Session-Id": "x"}) == (200, ["", ""])


@pytest.mark.parametrize("wrong", ["", " ", "a b", "-x", "x" * 129])
async def test_a_malformed_header_is_an_error_before_any_work(wrong):
    status, calls = await sessions(*COMPLETION, {"X-Session-Id": wrong})
    assert (status, calls) == (400, [])


@pytest.mark.parametrize("wrong", ["", "x" * 129, 7])
async def test_a_malformed_field_is_an_error(wrong):
    path, body = COMPLETION
    status, calls = await sessions(path, body | {"session_id": wrong})
    assert (status, calls) == (400, [])

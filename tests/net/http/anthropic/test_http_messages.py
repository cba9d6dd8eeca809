"""/v1/messages: bodies as Anthropic's clients send them, events in the documented order. The fake echoes its prompt."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from net.http.openai.tools import BEGIN, END
from tests.net.fake_frontend import FakeFrontend, serving

TOOL = {"name": "weather", "description": "?", "input_schema": {"type": "object"}}
CALL = BEGIN + '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n' + END
USER = [{"role": "user", "content": "hi"}]
RESULT = {"type": "tool_result", "tool_use_id": "1"}


@pytest.fixture
async def frontend():
    return FakeFrontend()


@pytest.fixture
async def api(frontend):
    async with serving(frontend, ignore_unknown=False) as url, aiohttp.ClientSession(url) as session:
        yield session


async def ask(api, path: str = "/v1/messages", **body: Any) -> tuple[int, dict[str, Any]]:
    async with api.post(path, json={"model": "fake", "max_tokens": 4, "messages": USER} | body) as response:
        return response.status, await response.json()


async def streamed(api, **body: Any) -> list[dict[str, Any]]:
    sent = {"model": "fake", "max_tokens": 4, "messages": USER, "stream": True} | body
    async with api.post("/v1/messages", json=sent) as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
        parts = [part.split("\n") for part in (await response.text()).strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


async def test_a_text(api, frontend):
    status, answer = await ask(api, system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}])
    assert status == 200 and answer["id"].startswith("msg_")
    del answer["id"]
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Behi"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 4,
        },
    }
    assert [message["role"] for message in frontend.rendered[0][0]] == ["system", "user"]


async def test_stop_sequences(api):
    _, answer = await ask(api, messages=[{"role": "user", "content": "abc"}], stop_sequences=["bc"], max_tokens=9)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "bc")


async def test_streamed_events_have_the_documented_order(api):
    """message_start, per block start, deltas, stop, then message_delta and message_stop."""
    text = "Both.\n" + CALL + "\n" + CALL
    events = await streamed(api, messages=[{"role": "user", "content": text}], tools=[TOOL], max_tokens=len(text))
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["input_tokens"] > 0) == ([], None, True)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"got": ""})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                kind = {"text": "text_delta", "tool_use": "input_json_delta"}[blocks[-1]["type"]]
                assert event["delta"]["type"] == kind
                blocks[-1]["got"] += event["delta"]["text" if kind == "text_delta" else "partial_json"]
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
            case other:
                assert other == "ping"
    assert not is_open and [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert blocks[0]["got"].strip() == "Both." and blocks[0]["text"] == ""
    assert [(block["name"], block["input"], json.loads(block["got"])) for block in blocks[1:]] == [
        ("weather", {}, {"city": "Oslo"})
    ] * 2
    assert events[-2]["usage"]["output_tokens"] == len(text) and events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_a_loop_with_a_tool(api, frontend):
    """The content goes back as a turn, with the result of the call."""
    forced = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    _, first = await ask(api, messages=[{"role": "user", "content": CALL}], max_tokens=len(CALL), **forced)
    (call,) = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    turns = [
        *USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I ask."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    status, _ = await ask(api, messages=turns, **forced)
    assert status == 200 and frontend.calls[0]["sampling"]["grammar"].startswith("call ")
    messages = frontend.rendered[1][0]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "hi"),
        ("assistant", "I ask."),
        ("tool", "rain"),
        ("user", "So?"),
    ]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]


async def test_tokens_are_counted_without_an_answer(api, frontend):
    async with api.post("/v1/messages/count_tokens", json={"system": "Be", "messages": USER}) as response:
        assert (response.status, await response.json()) == (200, {"input_tokens": 4})
    assert not frontend.calls


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": 5}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": {"text": "rain"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *USER]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "news"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 5000}, "messages"),
        ({"wibble": 1}, "wibble"),
    ],
)
async def test_refusals(api, frontend, body, param):
    status, answer = await ask(api, **body)
    assert status == 400 and answer["type"] == "error", answer
    assert str(answer["error"]["param"]).partition(".")[0] == param, answer
    assert answer["error"]["type"] == "invalid_request_error" and not frontend.calls


async def test_the_key_may_be_sent_as_anthropics_clients_do():
    async with serving(FakeFrontend(), api_key="secret") as url, aiohttp.ClientSession(url) as api:
        for headers, status in (({"X-Api-Key": "secret"}, 200), ({"X-Api-Key": "wrong"}, 401), ({}, 401)):
            async with api.post("/v1/messages", json={"max_tokens": 1, "messages": USER}, headers=headers) as response:
                assert response.status == status


async def test_an_error_within_a_stream_is_an_event(api):
    events = await streamed(api, messages=[{"role": "user", "content": "!late death"}], max_tokens=9)
    assert events[-1]["type"] == "error" and "died" in events[-1]["error"]["message"]


@pytest.mark.parametrize(("said", "shown"), [('"Oslo"', {"arguments": "Oslo"}), ("[1]", {"arguments": [1]})])
async def test_arguments_are_always_an_object(api, said, shown):
    text = f'{BEGIN}{{"name": "weather", "arguments": {said}}}{END}'
    asked = {"messages": [{"role": "user", "content": text}], "tools": [TOOL], "max_tokens": len(text)}
    _, answer = await ask(api, **asked)
    assert answer["content"][0]["input"] == shown
    (delta,) = [event["delta"] for event in await streamed(api, **asked) if event["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == shown


async def test_tools_that_only_other_servers_run_are_ignored_and_named(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
        sent = {"model": "fake", "max_tokens": 4, "messages": USER, "tools": tools}
        async with session.post("/v1/messages", json=sent) as response:
            assert response.status == 200
            assert response.headers["X-Ignored-Fields"] == "tools.web_search_20250305"
    assert [tool["function"]["name"] for tool in frontend.rendered[0][1]["tools"]] == ["weather"]

"""/v1/responses as the openai package reads it. The fake frontend echoes its prompt."""

from __future__ import annotations

import json

import openai
import pytest
from openai.lib.streaming.responses import ResponseTextDeltaEvent

from net.http.openai.tools import BEGIN, END
from tests.net.fake_frontend import FakeFrontend, serving

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = BEGIN + '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n' + END


@pytest.fixture
async def frontend():
    return FakeFrontend()


@pytest.fixture
async def client(frontend):
    async with (
        serving(frontend) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_text(client, frontend):
    answer = await client.responses.create(
        model="fake", input="hello", instructions="Be", max_output_tokens=7, store=True
    )
    assert (answer.output_text, answer.status, answer.incomplete_details.reason) == (
        "Behello",
        "incomplete",
        "max_output_tokens",
    )
    counts = answer.usage
    assert (counts.input_tokens, counts.input_tokens_details.cached_tokens, counts.output_tokens) == (7, 3, 7)
    assert [message["role"] for message in frontend.rendered[0][0]] == ["system", "user"]


async def test_streamed_events_are_those_of_the_package(client):
    text = "Both.\n" + CALL + "\n" + CALL
    async with client.responses.stream(
        model="fake", input=text, tools=[TOOL], max_output_tokens=len(text), top_p=0.5
    ) as stream:
        events = [event async for event in stream]
    kinds, whole = [event.type for event in events], events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    said = "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
    assert said == whole.output_text and said.strip() == "Both."
    calls = whole.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"})] * 2
    assert calls[0].call_id != calls[1].call_id and whole.top_p == 0.5


async def test_a_loop_with_a_tool(client, frontend):
    """The output goes back as input, with the result of the call."""
    asked = {"model": "fake", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    first = await client.responses.create(input=CALL, max_output_tokens=len(CALL), **asked)
    call = first.output[0]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "rain"}],
    }
    turns = [{"role": "user", "content": "?"}, {"type": "reasoning", "summary": []}, call.model_dump(), result]
    await client.responses.create(input=turns, max_output_tokens=3, **asked)
    assert frontend.calls[0]["sampling"]["grammar"].startswith("call ")
    messages = frontend.rendered[1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert messages[2]["content"] == "rain"


async def test_a_schema_is_a_grammar(client, frontend):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    answer = await client.responses.create(model="fake", input="?", max_output_tokens=3, text={"format": form})
    assert frontend.calls[0]["sampling"]["grammar"] == 'json {"type":"object"}'
    assert answer.text.format.schema_ == {"type": "object"}


async def test_a_long_conversation_is_truncated_if_its_client_wants_that(client, frontend):
    asked = {"model": "fake", "input": "b" * 1500 + "a" * 1500, "max_output_tokens": 500}
    answer = await client.responses.create(**asked, truncation="auto")
    assert bytes(frontend.calls[0]["prompt"]) == b"a" * 1500 and answer.truncation == "auto"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(**asked)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}]}, "messages"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": []}, "messages"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": 5}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"max_output_tokens": 5000}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
async def test_refusals(client, frontend, body, param):
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(**({"model": "fake", "input": "?"} | body))
    assert str(error.value.param).partition(".")[0] == param and not frontend.calls


async def test_tools_that_only_other_servers_run_are_ignored_and_named(client, frontend):
    tools = [{"type": "web_search"}, TOOL, {"type": "custom", "name": "patch"}]
    raw = await client.responses.with_raw_response.create(
        model="fake", input="?", max_output_tokens=1, tools=tools, tool_choice="auto"
    )
    assert raw.headers["X-Ignored-Fields"] == "tools.web_search, tools.custom"
    assert [tool["function"]["name"] for tool in frontend.rendered[0][1]["tools"]] == ["weather"]


async def test_where_unknown_fields_are_refused_tools_of_other_types_are_too(frontend):
    async with (
        serving(frontend, ignore_unknown=False) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="tools"):
            await client.responses.create(model="fake", input="?", tools=[{"type": "web_search"}])


async def test_an_error_within_a_stream_is_an_event(client):
    events = [event async for event in await client.responses.create(model="fake", input="!late death", stream=True)]
    assert (events[0].type, events[-1].type) == ("response.created", "response.failed")
    assert "died" in events[-1].response.error.message and events[-1].response.status == "failed"

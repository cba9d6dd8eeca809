"""Tools: what reaches the template, and what becomes of calls in the answer. The fake frontend echoes its prompt."""

from __future__ import annotations

import json

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.http.openai.tools import BEGIN, END, ToolText
from tests.net.fake_frontend import FakeFrontend, serving

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = BEGIN + '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n' + END

BROKEN = {"function": {"name": "f", "arguments": "{"}}


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


def asked(text: str, **more):
    """An answer that is `text`, ended by its last characters as a stop string."""
    length = {"max_tokens": len(text), "stop": text[-12:]}
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "tools": [WEATHER]} | length | more


async def test_a_call_becomes_tool_calls(client, frontend):
    answer = await client.chat.completions.create(**asked("I ask.\n" + CALL))
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Oslo"},
    )
    assert (choice.message.content, choice.finish_reason) == ("I ask.", "tool_calls")
    assert frontend.rendered[0][1]["tools"] == [WEATHER]


async def test_streamed_calls(client):
    text = "Both.\n" + CALL + "\n" + CALL
    stream = await client.chat.completions.create(**asked(text, stream=True, stop=None))
    chunks = [chunk.choices[0] async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert calls[0].id != calls[1].id
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip() == "Both."
    assert chunks[-1].finish_reason == "length"  # the fake was cut, it did not stop


async def test_one_call_when_the_client_wants_one(client):
    answer = await client.chat.completions.create(**asked(CALL + CALL, parallel_tool_calls=False))
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_without_tools_or_with_none_the_answer_is_text(client, frontend):
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        answer = await client.chat.completions.create(**asked(CALL, **more))
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALL, None)
        assert "tools" not in frontend.rendered[-1][1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_call_is_a_grammar(client, frontend, choice):
    other = {"type": "function", "function": {"name": "news"}}
    await client.chat.completions.create(**asked("?", tools=[WEATHER, other], tool_choice=choice, stop=None))
    kind, _, schema = frontend.calls[0]["sampling"]["grammar"].partition(" ")
    names = [call["properties"]["name"]["const"] for call in json.loads(schema)["anyOf"]]
    assert (kind, names) == ("call", ["weather", "news"] if choice == "required" else ["weather"])


async def test_the_result_of_a_call_reaches_the_template(client, frontend):
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    await client.chat.completions.create(**asked("?", messages=messages, stop=None))
    rendered = frontend.rendered[0][0]
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert rendered[2] == messages[2]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "news"}}}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
    ],
)
async def test_refusals(client, more, named):
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(**asked("?", **more))
    assert error.value.param == named


async def test_a_forced_call_has_no_text_that_a_format_could_be_of(client, frontend):
    form = {"type": "json_object"}
    await client.chat.completions.create(**asked("?", tool_choice="required", response_format=form, stop=None))
    assert frontend.calls[0]["sampling"]["grammar"].startswith("call ")


TAGGED = '{"name": "f", "arguments": {"a": "\\\\\\"' + END + BEGIN + '"}}'
WORDS = st.sampled_from(
    [BEGIN, END, '{"name": "f"}', '{"name": "f", "arguments": {"a": 1}}', TAGGED, "{", "<", "tool", "x\n", '"', "\\"]
)


@pytest.mark.parametrize("end", [END, ""])
def test_a_tag_in_a_string_of_a_call_is_a_part_of_it(end):
    content, (call,) = ToolText(99).feed("a" + BEGIN + TAGGED + end, last=True)
    assert content == "a" and orjson.loads(call["function"]["arguments"]) == {"a": '\\"' + END + BEGIN}


@given(st.lists(WORDS), st.lists(st.integers(1, 9)))
def test_pieces_give_what_the_whole_gives(words, sizes):
    text, split, pieces = "".join(words), ToolText(99), []
    for size in [*sizes, len(text) or 1]:
        pieces.append(split.feed(text[:size], last=False))
        text = text[size:]
    pieces.append(split.feed("", last=True))
    whole = ToolText(99).feed("".join(words), last=True)
    assert "".join(content for content, _ in pieces) == whole[0]
    shown = [[call["function"] for call in calls] for calls in ([c for _, cs in pieces for c in cs], whole[1])]
    assert shown[0] == shown[1]


@given(st.lists(WORDS))
def test_nothing_is_lost(words):
    """What is no call is content, character by character."""
    content, calls = ToolText(99).feed("".join(words), last=True)
    rest = "".join(words)
    for call in calls:
        head, _, inner = rest.partition(BEGIN)
        body, tail = _first_call(inner)
        while not _is_call(body):
            head += BEGIN + body + END
            more, _, inner = tail.partition(BEGIN)
            head, (body, tail) = head + more, _first_call(inner)
        assert content.startswith(head) and call["function"]["name"] == "f"
        content, rest = content.removeprefix(head), tail
    assert content == rest


def _first_call(text: str) -> tuple[str, str]:
    """(the shortest begin of `text` that is a call, or all before the first END; what follows its END)."""
    ends = [at for at in range(len(text)) if text.startswith(END, at)]
    found = next((at for at in [*ends, len(text)] if _is_call(text[:at])), [*ends, len(text)][0])
    return text[:found], text[found + len(END) :]


def _is_call(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False

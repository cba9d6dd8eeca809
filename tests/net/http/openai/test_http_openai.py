"""The stock openai package against a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from net.http.openai.tools import BEGIN, END
from tests.net.fake_frontend import FakeFrontend, serving

CHAT = [{"role": "user", "content": "hello"}]


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


async def test_completion(client, frontend):
    answer = await client.completions.create(model="fake", prompt="abcd", max_tokens=6, temperature=0)
    choice = answer.choices[0]
    assert (answer.id.startswith("cmpl-"), answer.object, answer.model) == (True, "text_completion", "fake")
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("abcdab", "length", 0, None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 6, 10)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert frontend.calls[0]["sampling"]["temperature"] == 0
    assert frontend.calls[0]["service_class"] == "standard"


async def test_default_lengths(client, frontend):
    await client.completions.create(model="fake", prompt="ab")
    await client.chat.completions.create(model="fake", messages=CHAT)
    assert [call["sampling"]["max_tokens"] for call in frontend.calls] == [16, 2000 - 5]


async def test_completion_stream(client):
    stream = await client.completions.create(
        model="fake", prompt="héé", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "héé"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cd"], ["aba", "cdc"]),
        ([97, 98], ["aba"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
    ],
)
async def test_prompt_shapes(client, prompt, texts):
    answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    assert [choice.text for choice in answer.choices] == texts


async def test_n_and_several_prompts(client, frontend):
    answer = await client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=2, n=2, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert [call["sampling"]["seed"] for call in frontend.calls] == [7, 8, 7, 8]
    assert len({call["request_id"] for call in frontend.calls}) == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_stream_of_several_choices(client):
    stream = await client.chat.completions.create(model="fake", messages=CHAT, max_tokens=7, n=3, stream=True)
    texts, roles = ["", "", ""], []
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content
        roles.append(choice.delta.role)
    assert texts == ["hellohe"] * 3
    assert sorted(filter(None, roles)) == ["assistant"] * 3


async def test_chat(client):
    answer = await client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=5, stop="lo")
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.choices[0].message.content == "hello"
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")


async def test_chat_stream_carries_the_role_first(client):
    stream = await client.chat.completions.create(model="fake", messages=CHAT, max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_a_template_of_a_trusted_client(client, frontend):
    own = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"a": 1}}
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        await client.chat.completions.create(model="fake", messages=CHAT, extra_body=own)
    frontend.trusts_chat_templates = True
    await client.chat.completions.create(model="fake", messages=CHAT, extra_body=own, max_tokens=1)
    ((_, arguments),) = frontend.rendered
    assert arguments == {"add_generation_prompt": True, "a": 1, "chat_template": "{{ messages }}"}


async def test_content_parts(client):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    answer = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": parts}], max_tokens=5
    )
    assert answer.choices[0].message.content == "ab\ncd"


async def test_echo(client):
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True)
    assert answer.choices[0].text == "abcab"
    stream = await client.completions.create(model="fake", prompt=[97, 98], max_tokens=2, echo=True, stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["aba", "b"]


async def test_completion_logprobs(client):
    answer = await client.completions.create(model="fake", prompt="xy", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["x", "y"], [-0.5, -0.5], [0, 1])
    assert logprobs.top_logprobs == [{"x": -0.5, "A": -1.5}, {"y": -0.5, "A": -1.5}]
    stream = await client.completions.create(model="fake", prompt="xy", max_tokens=2, logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [part.text_offset for part in parts] == [[0], [1]]
    assert [part.top_logprobs for part in parts] == [[{"x": -0.5}], [{"y": -0.5}]]


async def test_chat_logprobs(client):
    answer = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "é"}], max_tokens=2, logprobs=True, top_logprobs=3
    )
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.bytes, second.bytes) == ("\ufffd", [0xC3], [0xA9])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("\ufffd", -0.5), ("A", -1.5), ("B", -9999.0)]


async def test_extensions_reach_the_frontend(client, frontend):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "cache_salt": "tenant",
        "service_class": "batch",
    }
    await client.completions.create(
        model="fake", prompt="ab", max_tokens=1, logit_bias={"5": 1}, user="me", extra_body=extra
    )
    call = frontend.calls[0]
    for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens"):
        assert call["sampling"][name] == extra[name]
    assert call["sampling"]["stop_token_ids"] == (3,)
    assert call["sampling"]["logit_bias"] == {5: 1.0}
    assert (call["cache_salt"], call["service_class"]) == ("tenant", "batch")


async def test_errors_are_the_classes_of_the_package(client):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="fake", prompt="")
    with pytest.raises(openai.RateLimitError) as busy:
        await client.completions.create(model="fake", prompt="!overloaded")
    assert busy.value.response.headers["Retry-After"] == "2"
    with pytest.raises(openai.APIError, match="the decode node died"):
        _ = [c async for c in await client.completions.create(model="fake", prompt="!late death", stream=True)]


async def test_models(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"


async def test_sync_client(frontend):
    async with serving(frontend) as url:

        def ask() -> tuple[str, str]:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                whole = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=4)
                stream = client.completions.create(model="fake", prompt="xyz", max_tokens=4, stream=True)
                return whole.choices[0].message.content or "", "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(ask) == ("hell", "xyzx")


@pytest.mark.parametrize(("received", "rest"), [(0, "abcdab"), (4, "ab"), (6, ""), (9, "")])
async def test_a_client_that_comes_back_gets_what_it_does_not_have(client, frontend, received, rest):
    headers = {"X-Request-Id": "mine", "X-Resume-From": str(received)}
    body = {"model": "fake", "prompt": "abcd", "max_tokens": 6, "extra_headers": headers}
    whole = (await client.completions.create(**body)).choices[0]
    assert (whole.text, whole.finish_reason) == (rest, "length")
    stream = await client.completions.create(**body, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == rest
    assert all(call["again"] and call["request_id"] == "mine" for call in frontend.calls)


def resumed(received: int) -> dict[str, str]:
    return {"X-Request-Id": "mine", "X-Resume-From": str(received)}


@pytest.mark.parametrize("received", [0, 1, 4, 5])
async def test_a_text_that_begins_with_the_prompt_goes_on_where_it_broke(client, received):
    body = {"model": "fake", "prompt": "héé", "max_tokens": 6, "echo": True, "logprobs": 0, "stream": True}
    whole = [chunk async for chunk in await client.completions.create(**body)]
    rest = [chunk async for chunk in await client.completions.create(**body, extra_headers=resumed(received))]
    shown, later = ([(c.choices[0].text, c.choices[0].logprobs) for c in chunks] for chunks in (whole, rest))
    assert later == shown[received:] and len(later) == 6 - received
    answer = await client.completions.create(**body | {"stream": False}, extra_headers=resumed(received))
    assert answer.choices[0].text == "".join(text for text, _ in later)
    assert answer.usage.completion_tokens == 6 - received


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = BEGIN + '{"name": "weather", "arguments": {}}' + END


@pytest.mark.parametrize("received", [0, 3, 20, len(CALL) + 2, len(CALL) + 20, 2 * len(CALL)])
async def test_a_call_that_broke_off_is_a_call(client, received):
    """Two calls with a text between them; the first ones of the client's tokens are those of a call."""
    said = CALL + "and" + CALL
    body = {"model": "fake", "messages": [{"role": "user", "content": said}], "max_tokens": len(said), "tools": [TOOL]}

    async def streamed(**more: Any) -> list[tuple[str, list[tuple[int, str]]]]:
        stream = await client.chat.completions.create(**body, stream=True, **more)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        calls = [[(call.index, call.function.name) for call in delta.tool_calls or ()] for delta in deltas]
        return [(delta.content or "", called) for delta, called in zip(deltas, calls, strict=True)]

    whole = await streamed()
    assert sum(len(calls) for _, calls in whole) == 2
    assert await streamed(extra_headers=resumed(received)) == whole[received:]
    answer = await client.chat.completions.create(**body, extra_headers=resumed(received))
    assert len(answer.choices[0].message.tool_calls or ()) == sum(len(calls) for _, calls in whole[received:])


@pytest.mark.parametrize("headers", [{"X-Request-Id": "mine", "X-Resume-From": "x"}, {"X-Resume-From": "3"}])
async def test_coming_back_needs_the_id_and_a_number(client, headers):
    with pytest.raises(openai.BadRequestError, match="X-Resume-From"):
        await client.completions.create(model="fake", prompt="ab", extra_headers=headers)


@pytest.mark.parametrize("stop", ["lo", None])
async def test_the_last_chunk_says_what_stopped_the_answer(client, stop):
    asked = {"model": "fake", "max_tokens": 5, "stop": stop, "stream": True}
    chat = [chunk.choices[0] async for chunk in await client.chat.completions.create(messages=CHAT, **asked)]
    text = [chunk.choices[0] async for chunk in await client.completions.create(prompt="hello", **asked)]
    for chunks in (chat, text):
        assert chunks[-1].finish_reason == ("stop" if stop else "length") and chunks[-1].stop_reason == stop
        assert not any(hasattr(chunk, "stop_reason") for chunk in chunks[:-1])

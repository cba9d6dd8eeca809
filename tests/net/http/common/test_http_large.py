"""The largest requests that the API accepts do their work off the event loop; larger ones are refused by name."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from net.http import Output, create_app, docs, openapi
from net.http.common import body as bodies
from net.http.common import pieces
from net.http.common.errors import ApiError
from net.http.common.pieces import PIECE_VALUES, SENT_BYTES, SMALL_VALUES, VALUE_CHARS, Prepared, Rows, parts
from net.http.openai import responses
from net.http.openai.prompts import LONG_TEXT_CHARS
from net.http.openai.schema import MAX_BIASES, ChatBody, CompletionBody, DetokenizeBody
from tests.net.fake_frontend import FakeFrontend, serving
from tests.net.peers import until


class CountingFrontend(FakeFrontend):
    """Counts, by thread, tokens that are shown, and notes the most characters and ids that are converted at once."""

    max_model_len = 3000

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[tuple[int, str]] = Counter()
        self.loop_thread = threading.get_ident()

    def _most(self, what: str, amount: int) -> None:
        key = threading.get_ident(), what
        self.done[key] = max(self.done[key], amount)

    def on_loop(self, what: str) -> int:
        return self.done[self.loop_thread, what]

    def token_bytes(self, token_id: int) -> bytes:
        self.done[threading.get_ident(), "tokens"] += 1
        return super().token_bytes(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._most("characters", len(text))
        return super().encode(text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        self._most("ids", len(ids))
        return bytes(ids).decode("utf-8", "replace")  # not by token_bytes: those that are shown are counted

    def compile_grammar(self, kind: str, source: str) -> str:
        self._most("characters of a grammar", len(source))
        return super().compile_grammar(kind, source)


IDS = [65] * 2000
WORDS = [f"{i:064}" for i in range(256)]
PARAMETERS = {"enum": list(range(2000))}
SCHEMA = {"properties": {f"field_{i}": {"enum": [i]} for i in range(5000)}}
ASKED = {"input": "a", "instructions": "b" * 2000, "max_output_tokens": 9}
SHOWN = ASKED | {
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}] * 128,
    "tool_choice": "none",
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
}
CHOICE = {"type": "function", "name": "f", "more": list(range(200_000))}
TURNS = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": PARAMETERS}] * 128}
LARK = "start: " + " | ".join(f'"{i}"' for i in range(3000))
LARGEST = {
    "prompt_logprobs": ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 2, "n": 3}),
    "echo": ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 2}),
    "echo streamed": ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 2, "stream": True}),
    "logprobs": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 900, "logprobs": True, "top_logprobs": 20},
    ),
    "long text": ("/v1/completions", {"prompt": "a" * 2900, "max_tokens": 1}),
    "many messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}] * 2000, "max_tokens": 1},
    ),
    "tokenize": ("/tokenize", {"prompt": "a" * 200_000, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [65] * 200_000}),
    "logit_bias": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(257)}, "n": 128}),
    "stop ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": [66] * 512, "n": 128}),
    "allowed ids": ("/v1/completions", {"prompt": "a", "allowed_token_ids": [65] * 512, "n": 128}),
    "bad words": ("/v1/completions", {"prompt": "a", "bad_words": WORDS}),
    "regex": ("/v1/completions", {"prompt": "a", "guided_regex": "a" * (256 << 10)}),
    "Lark": ("/v1/completions", {"prompt": "a", "guided_grammar": LARK}),
    "GBNF": ("/v1/completions", {"prompt": "a", "guided_grammar": LARK.replace("start:", "root ::=")}),
    "responses": ("/v1/responses", SHOWN),
    "responses streamed": ("/v1/responses", SHOWN | {"stream": True}),
    "responses that fail": ("/v1/responses", SHOWN | {"stream": True, "instructions": None, "input": "!late death"}),
    "responses with tools": ("/v1/responses", SHOWN | {"tool_choice": "auto"}),
    "responses with a choice": ("/v1/responses", ASKED | {"tools": SHOWN["tools"][:1], "tool_choice": CHOICE}),
    "messages": ("/v1/messages", TURNS | {"max_tokens": 9, "tool_choice": {"type": "none"}}),
    "messages streamed": ("/v1/messages", TURNS | {"max_tokens": 9, "stream": True}),
    "count_tokens": ("/v1/messages/count_tokens", TURNS),
    "drain": ("/drain", {"timeout_s": 86_400, "grace_s": 3_600, "force": True}),
    "new weights": ("/v1/update_weights", {"prefix": "p" * 100, "version": "v" * 100, "tenant": "t" * 100}),
}
READS_NO_BODY = {"/v1/embeddings", "/ping", "/reset_prefix_cache", "/v1/batches/{batch_id}/cancel"}
OF_BATCHES = {"/v1/files", "/v1/batches"}
"""A file arrives in chunks that threads write, and a batch has at most 16 short values: tests/net/http/batches."""


def test_every_route_has_a_largest_body():
    routes = create_app(FakeFrontend()).router.routes()
    posts = {route.resource.canonical for route in routes if route.method == "POST" and route.resource is not None}
    assert {path for path, _ in LARGEST.values()} == posts - READS_NO_BODY - OF_BATCHES


@pytest.fixture
def on_loop(monkeypatch) -> list[int]:
    """Sizes of what the thread of this fixture, the event loop's, writes as JSON or copies out of a body, in values."""
    sizes, here = [0], threading.get_ident()
    dumps, model_dump = orjson.dumps, BaseModel.model_dump

    def note(size: int) -> None:
        if threading.get_ident() == here:
            sizes.append(size)

    def noted_dumps(*args: Any, **kwargs: Any) -> bytes:
        data = dumps(*args, **kwargs)
        note(len(data) // VALUE_CHARS)
        return data

    def noted_model_dump(*args: Any, **kwargs: Any) -> dict[str, Any]:
        fields = model_dump(*args, **kwargs)
        note(pieces._size(fields))
        return fields

    monkeypatch.setattr(orjson, "dumps", noted_dumps)
    monkeypatch.setattr(BaseModel, "model_dump", noted_model_dump)
    return sizes


@pytest.mark.parametrize("name", LARGEST)
async def test_no_large_request_is_worked_on_in_the_event_loop(name, on_loop):
    frontend = CountingFrontend()
    path, body = LARGEST[name]
    async with (
        serving(frontend) as url,
        aiohttp.ClientSession(url) as session,
        session.post(path, json=body) as response,
    ):
        text = await response.text()
        assert response.status == 200, text[:300]
    biases = {id(call["sampling"]["logit_bias"]) for call in frontend.calls}
    assert len(biases) <= 1, "all choices share one"
    words = {id(call["sampling"]["bad_words"]) for call in frontend.calls}
    assert len(words) <= 1, "all choices share them"
    output_tokens = sum(call["sampling"]["max_tokens"] for call in frontend.calls)
    assert frontend.on_loop("tokens") <= SMALL_VALUES + 2 * output_tokens, "the fake makes its output on the loop"
    assert frontend.on_loop("characters") <= LONG_TEXT_CHARS
    assert frontend.on_loop("ids") <= LONG_TEXT_CHARS
    assert not frontend.on_loop("characters of a grammar")
    assert max(on_loop) <= SMALL_VALUES
    assert ("failed" in text) == (name == "responses that fail")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_response_repeats_of_its_request(stream, monkeypatch):
    """It is encoded once, and is the same however often and in however many parts it is sent."""
    prepared = []
    monkeypatch.setattr(responses, "Prepared", lambda value: (prepared.append(value), Prepared(value))[1])
    body = SHOWN | {"stream": stream, "instructions": "b"}
    async with (
        serving(FakeFrontend()) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/responses", json=body) as response,
    ):
        text = await response.text()
    if stream:
        events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        shown = [event["response"] for event in events if "response" in event]
    else:
        shown = [orjson.loads(text)]
    assert [one["status"] for one in shown] == ["in_progress"] * 2 * stream + ["incomplete"]
    for one in shown:
        assert one["text"] == SHOWN["text"] and one["tool_choice"] == "none" and one["instructions"] == "b"
        assert one["tools"] == [{**tool, "description": None, "strict": None} for tool in SHOWN["tools"]]
    assert len(prepared) == 4


async def test_answers_are_the_same_however_they_are_made():
    frontend = CountingFrontend()
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        body = {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 2, "n": 2, "echo": True}
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
    first, second = answer["choices"]
    assert len(first["prompt_logprobs"]) == len(IDS) and first["prompt_logprobs"] == second["prompt_logprobs"]
    assert first["prompt_logprobs"][0] is None and set(first["prompt_logprobs"][1]) == {"65"}


TOO_LARGE = [
    ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 20, "n": 128}, 400, "--max-answer-logprobs"),
    ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 20, "max_tokens": 0}, 400, "--max-answer-logprobs"),
    ("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 1000, "n": 2}, 400, "--max-answer-logprobs"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}, 400, "4096"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "" for i in range(MAX_BIASES + 1)}}, 400, "got 4097"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {str(i): 1 for i in range(1001)}}, 400, "1001 values"),
    ("/v1/completions", {"prompt": "a", "stop": ["a" * 2000]}, 400, "1024"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 2000}, 400, "1024"),
    ("/detokenize", {"tokens": [65] * 400_000}, 413, "300000"),
    ("/v1/chat/completions", {"messages": [{"role": "a", "content": ""}] * 200_000}, 413, "300000"),
    ("/v1/completions", {"prompt": ["a", "a"], "n": 128, "logit_bias": {str(i): 1 for i in range(257)}}, 400, "65536"),
    ("/v1/completions", {"prompt": ["a"] * 8, "n": 128, "stop_token_ids": [1] * 65}, 400, "65536"),
    ("/v1/completions", {"prompt": ["a"] * 8, "n": 128, "allowed_token_ids": [65] * 65}, 400, "65536"),
    ("/v1/completions", {"prompt": "a", "n": 2, "bad_words": WORDS}, 400, "bad_words: 33024 tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 4097}, 400, "4096"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 3001}, 400, "3001 messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 2_000_000}]}, 413, "2000000"),
    ("/v1/completions", {"prompt": "a" * 2_000_001}, 413, "2000000"),
    ("/tokenize", {"prompt": "a" * 2_000_001}, 413, "2000000"),
    ("/v1/completions", {"prompt": "a" * (8 << 20)}, 413, "--max-body-bytes"),
]


@pytest.mark.parametrize(("path", "body", "status", "named"), TOO_LARGE)
async def test_what_is_too_large_is_refused_with_the_limit(path, body, status, named):
    async with (
        serving(CountingFrontend()) as url,
        aiohttp.ClientSession(url) as session,
        session.post(path, json=body) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, named in error["message"]) == (status, True), error["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [(CompletionBody, {"prompt": "a", "stop": [1] * 9}), (DetokenizeBody, {"tokens": ["a"] * 9})],
)
def test_a_list_is_wrong_from_its_first_wrong_element_on(kind, body):
    """An error for each of 300,000 elements held the interpreter lock for seconds."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() == 1


async def test_a_chat_without_max_tokens_gets_as_many_as_its_log_probabilities_leave_room_for():
    frontend = CountingFrontend()
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 2}
        async with session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
    assert [call["sampling"]["max_tokens"] for call in frontend.calls] == [20_000 // (21 * 2)] * 2


async def test_long_bodies_are_parsed_in_a_thread(monkeypatch):
    threads = []
    parsed = bodies.parsed
    monkeypatch.setattr(bodies, "parsed", lambda *args: (threads.append(threading.get_ident()), parsed(*args))[1])
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        for size in (10, 2 * bodies.LONG_BODY_BYTES):
            async with session.post("/tokenize", json={"prompt": "a" * size}) as response:
                assert response.status == 200
    assert threads[0] == threading.get_ident() != threads[1]


def test_a_refusal_does_not_keep_the_values_of_the_body():
    """It travels from the thread that parsed them to the event loop, which must not have to free them."""
    before = Counter(map(type, gc.get_objects()))[list]
    raw = orjson.dumps({"prompt": [[]] * 5000, "n": 0})
    with pytest.raises(ApiError) as refused:
        bodies.parsed(raw, CompletionBody)
    assert Counter(map(type, gc.get_objects()))[list] < before + 1000
    assert refused.value.status == 400


def test_a_long_conversation_is_refused_before_its_messages_are_checked():
    with pytest.raises(ApiError, match="at most 4096 messages, got 4097"):
        bodies.parsed(orjson.dumps({"messages": [1] * 4097}), ChatBody)
    with pytest.raises(ApiError, match=r"messages\.0"):
        bodies.parsed(orjson.dumps({"messages": [1] * 4096}), ChatBody)


async def test_a_chat_is_rendered_in_a_thread_whatever_makes_it_long():
    threads = []

    class Rendering(FakeFrontend):
        def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
            threads.append(threading.get_ident())
            return super().render_chat(messages, **kwargs)

    long, short = "a" * (2 * LONG_TEXT_CHARS), {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    bodies = [
        {"messages": [short]},
        {"messages": [short | {"name": long}]},
        {"messages": [short], "tools": [tool]},
        {"messages": [short], "chat_template_kwargs": {"documents": long}},
    ]
    async with serving(Rendering()) as url, aiohttp.ClientSession(url) as session:
        for body in bodies:
            for path in ("/v1/chat/completions", "/tokenize"):
                async with session.post(path, json=body) as response:
                    assert response.status == 200, await response.text()
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True] * 2 + [False] * 6


@pytest.mark.parametrize("more", [{"return_token_ids": True, "n": 3}, {"echo": True, "prompt": [IDS] * 4, "n": 128}])
async def test_ids_and_echoes_of_many_choices_are_encoded_in_a_thread(monkeypatch, more):
    """Neither the answer's tokens nor their log probabilities say how long these are."""
    threads, parts_of = [], pieces.parts
    monkeypatch.setattr(pieces, "parts", lambda value: (threads.append(threading.get_ident()), parts_of(value))[1])
    body = {"prompt": IDS, "max_tokens": 1} | more
    async with (
        serving(CountingFrontend()) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        choices = (await response.json())["choices"]
    for choice in choices:
        assert choice.get("prompt_token_ids", IDS) == IDS
        assert choice["text"] == ("A" * 2001 if "echo" in more else "A")
    assert len(threads) == 1 and threads[0] != threading.get_ident()


class Turns(FakeFrontend):
    """Notes in which turn of the event loop each generation begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.begun: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Output, None]:
        self.begun[self.turn] += 1
        try:
            async with aclosing(super().generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.ended[self.turn] += 1


@pytest.mark.parametrize("prompt", ["!hang", "!overloaded"])
async def test_the_choices_of_a_request_begin_and_end_one_after_the_other(prompt):
    """Each is a request to the nodes: a thousand in one turn of the loop kept everybody waiting for half a second."""
    frontend = Turns()
    counting = asyncio.create_task(frontend.count())
    body = {"prompt": [prompt] * 8, "n": 128}
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        if prompt == "!hang":
            asked = asyncio.create_task(session.post("/v1/completions", json=body))
            await until(lambda: frontend.begun.total() == 1024, 120)
            asked.cancel()
            await frontend.idle.wait()
            assert frontend.begun.total() == 1024 and asked.cancelled()
        else:
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 429
    counting.cancel()
    assert frontend.begun.total() == frontend.ended.total() and not frontend.open
    assert max(frontend.begun.values()) <= 2 and max(frontend.ended.values()) <= 2


async def test_the_description_of_the_api_is_made_in_a_thread(monkeypatch):
    threads = []
    for module, name in ((openapi, "document"), (docs, "page")):
        made = getattr(module, name)
        noted = lambda *args, made=made: (threads.append(threading.get_ident()), made(*args))[1]  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        for path in ("/openapi.json", "/docs"):
            async with session.get(path) as response:
                assert response.status == 200
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_a_long_answer_leaves_in_turns():
    """A client that reads quickly would take all of it in one."""
    sent, turn = [], 0

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    async for _ in pieces.in_turns([b"a"] * 5):
        sent.append(turn)
    counting.cancel()
    assert sent == sorted(set(sent))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@settings(deadline=None)
@given(json_values, st.integers(0, 3), st.sampled_from(["rows", "prepared", "list"]))
def test_parts_are_the_same_json_and_bounded(value, scale, how):
    many = [value] * (scale * PIECE_VALUES // 3 + scale)
    shown = {"rows": Rows(lambda: iter(many)), "prepared": Prepared(many), "list": many}[how]
    encoded: list[int] = []
    dumps = pieces._dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_dumps", lambda value: (encoded.append(pieces._size(value)), dumps(value))[1])
        found = parts({"a": shown, "b": {"c": [shown, 1]}, "d": []})
    assert orjson.loads(b"".join(found)) == {"a": many, "b": {"c": [many, 1]}, "d": []}
    assert max(encoded) <= PIECE_VALUES + 1, "no piece is larger: what is in it is small"
    assert all(len(part) <= 2 * SENT_BYTES for part in found)


def test_a_list_that_stands_in_many_places_is_made_once():
    made = []
    rows = Rows(lambda: (made.append(i) or i for i in range(10)))
    assert orjson.loads(b"".join(parts({str(i): [rows] for i in range(50)}))) == {
        str(i): [list(range(10))] for i in range(50)
    }
    assert made == list(range(10))
    assert orjson.loads(pieces._dumps({"a": Rows(list)})) == {"a": []}
    with pytest.raises(TypeError):
        pieces._dumps(object())

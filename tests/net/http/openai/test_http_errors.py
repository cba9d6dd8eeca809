"""Bad input, keys, limits, and failures behind the API: every one gets its status and an OpenAI body."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import aiohttp
import orjson
import pytest

from tests.net.fake_frontend import FakeFrontend, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> bytes:
    return orjson.dumps({"prompt": "ab", "max_tokens": 2} | fields)


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"messages": USER, "max_tokens": 2} | fields)


def deep(levels: int) -> dict[str, Any]:
    """A schema of so many objects, each a property of the one before."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def deep_format(levels: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(levels)}}


DEEP_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 300 + "]" * 300}}


@pytest.fixture
async def api():
    limits = {"max_body_bytes": 1 << 20, "ignore_unknown": False}
    async with serving(FakeFrontend(), **limits) as url, aiohttp.ClientSession(url) as session:
        yield session


BAD = {
    "malformed json": (COMPLETIONS, b'{"prompt": "ab"', 400, None),
    "no body": (COMPLETIONS, b"", 400, None),
    "not an object": (COMPLETIONS, b"[1, 2]", 400, None),
    "invalid utf-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400, None),
    "lone surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None),
    "deep nesting": (COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None),
    "nan": (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, None),
    "huge number": (COMPLETIONS, b'{"prompt": "a", "seed": 123456789012345678901234567890}', 400, "seed"),
    "no prompt": (COMPLETIONS, b"{}", 400, "prompt"),
    "null prompt": (COMPLETIONS, completion(prompt=None), 400, "prompt"),
    "empty prompt": (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    "empty list": (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    "empty string in list": (COMPLETIONS, completion(prompt=["a", ""]), 400, "prompt"),
    "empty ids": (COMPLETIONS, completion(prompt=[[]]), 400, "prompt"),
    "mixed prompt": (COMPLETIONS, completion(prompt=["a", 1]), 400, "prompt"),
    "float ids": (COMPLETIONS, completion(prompt=[1.5]), 400, "prompt"),
    "bool ids": (COMPLETIONS, completion(prompt=[True]), 400, "prompt"),
    "object prompt": (COMPLETIONS, completion(prompt={"a": 1}), 400, "prompt"),
    "unknown id": (COMPLETIONS, completion(prompt=[5, 257]), 400, "prompt"),
    "negative id": (COMPLETIONS, completion(prompt=[5, -1]), 400, "prompt"),
    "too long": (COMPLETIONS, completion(prompt="a" * 2000), 400, "prompt"),
    "too long with output": (COMPLETIONS, completion(prompt="a" * 1999), 400, "prompt"),
    "unknown field": (COMPLETIONS, completion(wibble=1), 400, "wibble"),
    "unknown nested field": (COMPLETIONS, completion(stream_options={"x": 1}), 400, "stream_options.x"),
    "string for a number": (COMPLETIONS, completion(temperature="hot"), 400, "temperature"),
    "digits for a number": (COMPLETIONS, completion(max_tokens="5"), 400, "max_tokens"),
    "bool for a number": (COMPLETIONS, completion(max_tokens=True), 400, "max_tokens"),
    "number for a bool": (COMPLETIONS, completion(stream=1), 400, "stream"),
    "n = 0": (COMPLETIONS, completion(n=0), 400, "n"),
    "too many choices": (COMPLETIONS, completion(prompt=["a"] * 20, n=100), 400, "prompt"),
    "too many stops": (COMPLETIONS, completion(stop=["x"] * 17), 400, "stop"),
    "wrong stop": (COMPLETIONS, completion(stop=[1]), 400, "stop"),
    "unknown stop id": (COMPLETIONS, completion(stop_token_ids=[999]), 400, "stop_token_ids"),
    "bias of no id": (COMPLETIONS, completion(logit_bias={"a": 1}), 400, "logit_bias"),
    "bias of unknown id": (COMPLETIONS, completion(logit_bias={"999": 1}), 400, "logit_bias"),
    "bias out of range": (COMPLETIONS, completion(logit_bias={"1": 101}), 400, "logit_bias"),
    "no tokens": (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens"),
    "logprobs out of range": (COMPLETIONS, completion(logprobs=21), 400, "logprobs"),
    "suffix": (COMPLETIONS, completion(suffix="end"), 400, "suffix"),
    "fewer draws than choices": (COMPLETIONS, completion(n=3, best_of=2), 400, "best_of"),
    "best of a stream": (COMPLETIONS, completion(best_of=2, stream=True), 400, "best_of"),
    "too many draws": (COMPLETIONS, completion(prompt=["a"] * 20, best_of=100), 400, "prompt"),
    "own template": (CHAT, chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    "two ends": (CHAT, chat(continue_final_message=True), 400, "continue_final_message"),
    "no allowed id": (COMPLETIONS, completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    "unknown allowed id": (COMPLETIONS, completion(allowed_token_ids=[999]), 400, "allowed_token_ids"),
    "empty bad word": (COMPLETIONS, completion(bad_words=["x", ""]), 400, "bad_words"),
    "long salt": (COMPLETIONS, completion(cache_salt="x" * 300), 400, "cache_salt"),
    "unknown class": (COMPLETIONS, completion(service_class="royal"), 400, "service_class"),
    "class of a wrong type": (COMPLETIONS, completion(service_class=1), 400, "service_class"),
    "empty class": (COMPLETIONS, completion(service_class=""), 400, "service_class"),
    "class of a chat": (CHAT, chat(service_class="Batch"), 400, "service_class"),
    "priority is text": (COMPLETIONS, completion(priority="high"), 400, "priority"),
    "priority is a fraction": (COMPLETIONS, completion(priority=0.5), 400, "priority"),
    "priority is a bool": (CHAT, chat(priority=True), 400, "priority"),
    "refused by the engine": (COMPLETIONS, completion(prompt="!invalid"), 400, "top_p"),
    "refused by the engine, stream": (COMPLETIONS, completion(prompt="!invalid", stream=True), 400, "top_p"),
    "refused, one of two": (COMPLETIONS, completion(prompt=["!hang", "!invalid"], stream=True), 400, "top_p"),
    "unknown model": (COMPLETIONS, completion(model="gpt-9"), 404, "model"),
    "body too large": (COMPLETIONS, completion(prompt="a" * (10 << 20)), 413, None),
    "overloaded": (COMPLETIONS, completion(prompt="!overloaded"), 429, None),
    "overloaded, stream": (COMPLETIONS, completion(prompt="!overloaded", stream=True), 429, None),
    "unavailable": (COMPLETIONS, completion(prompt="!unavailable"), 503, None),
    "crash": (COMPLETIONS, completion(prompt="!crash"), 500, None),
    "crash, stream": (COMPLETIONS, completion(prompt="!crash", stream=True), 500, None),
    "late crash, whole": (COMPLETIONS, completion(prompt="!late", max_tokens=9), 500, None),
    "end without reason": (COMPLETIONS, completion(prompt="!silent-end", max_tokens=9), 500, None),
    "deep schema": (COMPLETIONS, completion(guided_json=deep(127)), 400, "guided_json"),
    "deep tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "x": deep(60)}}]), 400, "tools"),
    "deep format": (CHAT, chat(response_format=deep_format(120)), 400, "response_format"),
    "deep template argument": (CHAT, chat(chat_template_kwargs=deep(120)), 400, "chat_template_kwargs"),
    "deep arguments": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [DEEP_CALL]}]), 400, "messages"),
    "refusal without text": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "refusal"}]}]),
        400,
        "messages",
    ),
    "no messages": (CHAT, b"{}", 400, "messages"),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages"),
    "message without role": (CHAT, chat(messages=[{"content": "x"}]), 400, "messages.0.role"),
    "message of a wrong type": (CHAT, chat(messages=["x"]), 400, "messages"),
    "content of a wrong type": (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages"),
    "image": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages"),
    "nothing to say": (CHAT, chat(messages=[{"role": "user", "content": ""}]), 400, "messages"),
    "role the template refuses": (CHAT, chat(messages=[{"role": "nobody", "content": "x"}]), 400, "messages"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function"),
    "unknown format": (CHAT, chat(response_format={"type": "yaml"}), 400, "response_format"),
    "embeddings": ("/v1/embeddings", b'{"model": "fake", "input": "x"}', 400, None),
    "reserved template argument": (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    "template as an argument": (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        400,
        "chat_template_kwargs",
    ),
    "own template of tokens": ("/tokenize", chat(max_tokens=None, chat_template="{{ 1 }}"), 400, "chat_template"),
    "reserved word of templates": (CHAT, chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs"),
    "tokenize nothing": ("/tokenize", b"{}", 400, "prompt"),
    "detokenize unknown id": ("/detokenize", b'{"tokens": [999]}', 400, "tokens"),
}


CRASHES = {name: pytest.mark.expects_error("request .* failed") for name, row in BAD.items() if row[2] == 500}


@pytest.mark.parametrize("case", [pytest.param(name, marks=CRASHES.get(name, ())) for name in BAD])
async def test_bad_input(api, case):
    path, body, status, param = BAD[case]
    async with api.post(path, data=body, headers=JSON) as response:
        answer = await response.json()
        assert response.status == status, answer
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and len(error["message"]) <= 1000
        assert error["param"] == param
        assert "secret" not in error["message"] and "Traceback" not in error["message"]
        assert response.headers["X-Request-Id"]
        if status in (429, 503):
            assert int(response.headers["Retry-After"]) >= 1
        if status == 500:
            assert response.headers["X-Request-Id"] in error["message"]
    async with api.post(COMPLETIONS, data=completion(), headers=JSON) as response:
        assert response.status == 200, "the server must live on"


async def test_nulls_and_harmless_fields_are_accepted(api):
    fields = {"logprobs": None, "stop": None, "best_of": 1, "suffix": None, "user": "x", "metadata": {"a": "b"}}
    async with api.post(COMPLETIONS, data=completion(**fields), headers=JSON) as response:
        assert response.status == 200
    async with api.post(CHAT, data=chat(response_format={"type": "text"}, tools=[]), headers=JSON) as response:
        assert response.status == 200
    fields = {"continue_final_message": False, "detokenize": True, "stream_options": {"include_obfuscation": False}}
    async with api.post(CHAT, data=chat(**fields), headers=JSON) as response:
        assert response.status == 200
    async with api.post(COMPLETIONS, data=completion(n=2, best_of=2), headers=JSON) as response:
        assert response.status == 200, "the best 2 of 2"


UNKNOWN = {
    "a field": (COMPLETIONS, completion(wibble=1, ignore_eos=False), "wibble"),
    "fields of parts": (COMPLETIONS, completion(stream_options={"x": 1, "include_usage": True}, y=None), "x"),
    "of a stream": (CHAT, chat(stream=True, thinking={"type": "enabled"}), "thinking"),
    "of a tool": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f"}, "cache_control": {}}]),
        "cache_control",
    ),
    "many": (
        COMPLETIONS,
        completion(**{f"a{i}": 1 for i in range(50)}),
        ", ".join(f"a{i}" for i in range(16)) + ", ...",
    ),
    "a bad name": (COMPLETIONS, completion(**{"x\r\nSet-Cookie: é" + "y" * 99: 1}), "x??Set-Cookie???" + "y" * 48),
    "none": (COMPLETIONS, completion(user="x"), None),
    "of messages, which the template gets": (CHAT, chat(messages=[USER[0] | {"name": "me"}]), None),
}


@pytest.mark.parametrize("case", UNKNOWN)
async def test_unknown_fields_are_ignored_and_named(case):
    path, body, named = UNKNOWN[case]
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        async with session.post(path, data=body, headers=JSON) as response:
            assert (response.status, response.headers.get("X-Ignored-Fields")) == (200, named)
        async with session.post(path, data=completion(response_format={"type": "text", "x": 1}), headers=JSON) as wrong:
            assert wrong.status == 400, "a field that may say how the answer looks is never ignored"


async def test_deep_schemas_within_the_limit_are_served(api):
    async with api.post(COMPLETIONS, data=completion(guided_json=deep(50)), headers=JSON) as response:
        assert response.status == 200


async def test_messages_without_content_and_refusals_have_a_text():
    frontend = FakeFrontend()
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    contents = [{"content": None}, {}, {"content": None, "refusal": "no"}, {"content": parts}, {"content": "x"}]
    messages = [{"role": "assistant", **content} for content in contents]
    async with (
        serving(frontend) as url,
        aiohttp.ClientSession(url) as session,
        session.post(CHAT, data=chat(messages=messages), headers=JSON) as response,
    ):
        assert response.status == 200
    assert [message["content"] for message in frontend.rendered[0][0]] == ["", "", "no", "a\nb", "x"]


async def test_a_prompt_may_be_truncated():
    frontend = FakeFrontend()
    cases = [(completion(prompt="abcdef", truncate_prompt_tokens=3, echo=True), b"def")]
    cases += [(completion(prompt=[97] * 5000, truncate_prompt_tokens=-1), b"a" * 1998)]
    cases += [(completion(prompt=[97, 98], truncate_prompt_tokens=9), b"ab")]
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        for body, kept in cases:
            async with session.post(COMPLETIONS, data=body, headers=JSON) as response:
                answer = await response.json()
                assert response.status == 200, answer
            assert bytes(frontend.calls[-1]["prompt"]) == kept
            assert answer["choices"][0]["text"].startswith(kept[:3].decode()[:2])
        truncated = chat(messages=[{"role": "user", "content": "abcdef"}], truncate_prompt_tokens=2)
        async with session.post(CHAT, data=truncated, headers=JSON) as response:
            assert response.status == 200 and bytes(frontend.calls[-1]["prompt"]) == b"ef"
        long = {"messages": [{"role": "user", "content": "a" * 5000}], "truncate_prompt_tokens": -1}
        for limit in ("max_tokens", "max_completion_tokens"):
            async with session.post(CHAT, json={**long, limit: 500}) as response:
                assert response.status == 200 and bytes(frontend.calls[-1]["prompt"]) == b"a" * 1500
        async with session.post(COMPLETIONS, data=completion(truncate_prompt_tokens=0), headers=JSON) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("text/plain", "not 'text/plain'"),
        ("application/x-www-form-urlencoded", "curl -d alone, without this header, sends a form"),
        ("multipart/form-data", "not 'multipart/form-data'"),
        (None, "names no type"),
        ("", "names no type"),
    ],
)
async def test_other_content_types(api, kind, told):
    headers = {} if kind is None else {"Content-Type": kind}
    sent = {"data": completion(), "headers": headers, "skip_auto_headers": ["Content-Type"]}
    async with api.post(COMPLETIONS, **sent) as response:
        assert response.status == 415
        message = (await response.json())["error"]["message"]
    assert "send the body as 'Content-Type: application/json'" in message and told in message


@pytest.mark.parametrize(
    ("coding", "body", "status", "told"),
    [
        ("gzip", gzip.compress(b'{"prompt": "ab"}'), 200, "fake"),
        ("Deflate", zlib.compress(b'{"prompt": "ab"}'), 200, "fake"),
        ("identity", b'{"prompt": "ab"}', 200, "fake"),
        ("gzip", b"this is no gzip", 400, "could not be decompressed"),
        ("gzip", gzip.compress(b'{"prompt": "ab"}')[:-9], 400, "not one whole stream"),
        ("gzip", gzip.compress(b'{"prompt": "ab"}') * 2, 400, "not one whole stream"),
        ("gzip", gzip.compress(bytes(9 << 20)), 413, "--max-body-bytes"),
        ("br", b"x", 415, "not 'br'"),
    ],
    ids=("gzip", "zlib", "plain", "garbage", "broken off", "twice", "bomb", "brotli"),
)
async def test_compressed_bodies(api, coding, body, status, told):
    headers = JSON | {"Content-Encoding": coding}
    async with api.post(COMPLETIONS, data=body, headers=headers, compress=False) as response:
        assert (response.status, told in await response.text()) == (status, True)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions? A client's base URL is"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/V1//Chat/Completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/rerank", "GET /openapi.json lists all routes"),
    ],
)
async def test_a_wrong_base_url_is_explained(api, path, words):
    async with api.post(path, data=b"{}", headers=JSON) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (404, "unknown_url") and words in error["message"]


async def test_unknown_route_and_wrong_method(api):
    async with api.get("/v2/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"
    async with api.get(COMPLETIONS) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert "POST" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("!late death", "the decode node died"),
        pytest.param("!late", "request id", marks=pytest.mark.expects_error("request .* failed")),
    ],
)
async def test_error_after_the_first_token_is_an_event(api, prompt, message):
    body = completion(prompt=prompt, max_tokens=9, stream=True)
    async with api.post(COMPLETIONS, data=body, headers=JSON) as response:
        assert response.status == 200
        events = (await response.read()).decode().strip().split("\n\n")
    assert len(events) == 3
    assert message in orjson.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert "secret" not in events[-1]


async def test_api_key():
    async with serving(FakeFrontend(), api_key="s3cret") as url, aiohttp.ClientSession(url) as session:
        for path, status in {"/health": 200, "/metrics": 200, "/v1/models": 401, "/nowhere": 401}.items():
            async with session.get(path) as response:
                assert response.status == status, path
        for header in ("Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3crétt", "Bearer "):
            async with session.get("/v1/models", headers={"Authorization": header}) as response:
                assert response.status == 401
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert response.headers["WWW-Authenticate"] == "Bearer"
        async with session.get("/v1/models", headers={"Authorization": "Bearer s3cret"}) as response:
            assert response.status == 200

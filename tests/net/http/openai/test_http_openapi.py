"""The OpenAPI document is true: every route is in it, and what it says of bodies is what the server accepts."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from lab.fuzz.promises import Promises
from net.http import create_app
from net.http.openai.fields import IGNORED
from net.http.openai.rules import FIELDS, RULES, UNSAID, values
from net.http.openai.schema import ChatBody, CompletionBody, StreamOptions
from net.http.openai.tools import Tool
from net.http.openapi import OPERATIONS, document
from tests.net.fake_frontend import FakeFrontend, serving
from tests.net.http.openai.test_http_errors import BAD, CHAT, COMPLETIONS, JSON, chat, completion


def _is_json(body):
    """As the fuzzer's archive has it: text, and JSON that is no NaN."""
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


async def fetch(**options):
    async with serving(FakeFrontend(), **options) as url, aiohttp.ClientSession(url) as session:
        key = {"Authorization": f"Bearer {options['api_key']}"} if "api_key" in options else {}
        async with session.get("/openapi.json", headers=key) as response:
            assert response.status == 200
            return await response.json()


async def test_every_route_is_in_it_and_nothing_else():
    described = await fetch()
    shown = {f"{method.upper()} {path}" for path, item in described["paths"].items() for method in item}
    routes = create_app(FakeFrontend()).router.routes()
    assert shown == {f"{route.method} {route.resource.canonical}" for route in routes if route.method != "HEAD"}
    assert shown == set(OPERATIONS)


async def _nothing(request):
    return web.Response()


def test_a_route_without_a_line_is_an_error():
    app = web.Application()
    app.router.add_get("/new", _nothing)
    with pytest.raises(LookupError, match="GET /new"):
        document(app.router.routes(), "1", False, values(FakeFrontend()), True)


async def test_references_and_fields():
    described = await fetch()
    schemas = described["components"]["schemas"]
    found, left = set(), [described]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            found |= {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            left += part.values()
        elif isinstance(part, list):
            left += part
    assert found and {name.rpartition("/")[2] for name in found} <= set(schemas)
    for model in (CompletionBody, ChatBody):
        assert set(schemas[model.__name__]["properties"]) >= set(model.model_fields) | IGNORED
        assert "additionalProperties" not in schemas[model.__name__]
    strict = await fetch(ignore_unknown=False)
    for model in (CompletionBody, ChatBody, StreamOptions, Tool):
        assert strict["components"]["schemas"][model.__name__]["additionalProperties"] is False


async def test_open_and_closed_routes():
    described = await fetch(api_key="k")
    assert "security" not in described["paths"]["/health"]["get"]
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "securitySchemes" not in (await fetch())["components"]


def test_rules_are_of_models_and_fields_that_exist():
    described = document(create_app(FakeFrontend()).router.routes(), "1", False, values(FakeFrontend()), False)
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for name in RULES:
        fields = {field for part in _objects(RULES[name]) for field in part.get("properties", {})}
        assert "properties" in schemas[name] and fields - {"function", "name", "type"} <= set(
            schemas[name]["properties"]
        )
    for name, fields in FIELDS.items():
        assert set(fields) <= set(schemas[name]["properties"])


def _objects(part):
    if isinstance(part, dict):
        yield part
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _objects(child)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "x"}
REFUSAL = {"type": "refusal", "refusal": "no"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "x"}]
BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]
MOST = 2**63 - 1

GOOD = {
    "ids": (COMPLETIONS, completion(prompt=[[1, 2], [256]])),
    "texts": (COMPLETIONS, completion(prompt=["a", "b"], n=2, seed=MOST)),
    "whole floats": (COMPLETIONS, completion(max_tokens=2.0, n=1.0, seed=5.0, priority=-1.0)),
    "whole floats as ids": (COMPLETIONS, completion(prompt=[[1.0, 2], [3]], stop_token_ids=[4.0])),
    "whole floats as one prompt": (COMPLETIONS, completion(prompt=[1, 2.0])),
    "the prompt alone": (COMPLETIONS, completion(max_tokens=0, echo=True, logprobs=2)),
    "unknown": (COMPLETIONS, completion(wibble=1, stream_options={"wobble": 2})),
    "nulls": (COMPLETIONS, completion(stop=None, max_tokens=None, response_format=None, model=None)),
    "bias": (COMPLETIONS, completion(logit_bias={"5": -100, "7": 100.0}, stop="x", stop_token_ids=[1])),
    "bans": (COMPLETIONS, completion(bad_words=["no"], allowed_token_ids=[1, 2.0])),
    "continued": (CHAT, chat(messages=BEGUN, add_generation_prompt=False, continue_final_message=True)),
    "named model": (COMPLETIONS, completion(model="fake", user=5, metadata=[], suffix="")),
    "extremes": (COMPLETIONS, completion(temperature=1e308, repetition_penalty=1e-308, top_k=MOST, min_tokens=2)),
    "parts": (CHAT, chat(messages=[{"role": "user", "content": [PART, PART], "name": "me"}])),
    "a refusal": (CHAT, chat(messages=[{"role": "assistant", "content": [PART, REFUSAL]}, *CALLED])),
    "an earlier call": (CHAT, chat(messages=CALLED)),
    "forced": (CHAT, chat(tools=[TOOL], tool_choice="required")),
    "forced with a format": (CHAT, chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})),
    "named tool": (CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})),
    "logprobs of texts": (COMPLETIONS, completion(logprobs=2, echo=True, prompt_logprobs=1, return_token_ids=True)),
    "logprobs": (CHAT, chat(logprobs=True, top_logprobs=3, prompt_logprobs=1, stream=False)),
    "template": (CHAT, chat(chat_template_kwargs={"enable_thinking": False}, tools=None)),
    "structured": (CHAT, chat(response_format=FORMAT, min_tokens=0, ignore_eos=None, structured_outputs={})),
    "once": (CHAT, chat(response_format={"type": "text"}, structured_outputs={"regex": "a", "json": None})),
    "text": ("/tokenize", b'{"prompt": "", "messages": null}'),
    "messages": ("/tokenize", b'{"messages": [{"role": "user", "content": "x"}]}'),
    "strings": ("/tokenize", b'{"prompt": "ab", "return_token_strs": true}'),
    "tokens": ("/detokenize", b'{"tokens": []}'),
    "tokens as floats": ("/detokenize", b'{"tokens": [97.0, 98]}'),
    "a response": ("/v1/responses", b'{"input": "hi", "max_output_tokens": 2, "tools": [], "metadata": {"a": "b"}}'),
    "items": ("/v1/responses", b'{"input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "text"}}}'),
    "a message": ("/v1/messages", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_k": 4}'),
    "counted": ("/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "hi"}], "system": "x"}'),
}
REFUSED = {
    "no answer wanted": (CHAT, chat(max_tokens=0), "max_tokens"),
    "no answer wanted, new name": (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    "streamed prompt": (COMPLETIONS, completion(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    "two structures": (COMPLETIONS, completion(guided_regex="a", response_format=FORMAT), "response_format"),
    "two in one": (COMPLETIONS, completion(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
    "format without schema": (CHAT, chat(response_format={"type": "json_schema"}), "response_format"),
    "pattern of no regex": (CHAT, chat(response_format={"type": "text", "pattern": "a"}), "response_format"),
    "empty stop": (COMPLETIONS, completion(stop=["a", ""]), "stop"),
    "forced without tools": (CHAT, chat(tool_choice="required"), "tool_choice"),
    "forced and structured": (CHAT, chat(tool_choice="required", tools=[TOOL], guided_regex="a"), "guided_regex"),
    "unknown choice": (CHAT, chat(tool_choice="maybe"), "tool_choice"),
    "part of a part": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages"),
    "call of nothing": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages"),
    "more than fits": (COMPLETIONS, completion(max_tokens=2000), "prompt"),
    "text and messages": ("/tokenize", b'{"prompt": "x", "messages": [{"role": "user"}]}', "prompt"),
    "no messages": ("/tokenize", b'{"messages": []}', "messages"),
    "priority beyond 64 bits": (COMPLETIONS, b'{"prompt": "a", "priority": -9223372036854775809}', "priority"),
    "bias of a huge id": (COMPLETIONS, completion(logit_bias={"12345678901": 1}), "logit_bias"),
    "two ends of a prompt": (CHAT, chat(continue_final_message=True), "continue_final_message"),
    "nothing allowed": (COMPLETIONS, completion(allowed_token_ids=[]), "allowed_token_ids"),
    "a bad word that is none": (COMPLETIONS, completion(bad_words=["a", ""]), "bad_words"),
}


async def _answers(cases, **options):
    """Of each case: its name, (status, answer), and whether the document allows the body. Answers are as it says."""
    async with serving(FakeFrontend(), **options) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/openapi.json") as response:
            described = await response.json()
        promises = Promises(described)
        for name, (path, body, *_) in cases.items():
            async with session.post(path, data=body, headers=JSON) as response:
                answer = await response.json()
            told = described["paths"][path]["post"]["responses"]
            schema = told.get(str(response.status), told["default"])["content"]["application/json"]["schema"]
            wrong = Draft202012Validator(schema | {"components": described["components"]}).iter_errors(answer)
            assert [error.message for error in wrong] == [], (name, answer)
            yield name, (response.status, answer), promises.allows(f"POST {path}", body.decode())


async def test_what_it_allows_is_served():
    async for name, (status, answer), allowed in _answers(GOOD):
        assert (status, allowed) == (200, True), (name, answer)


async def test_answers_to_questions_are_as_it_says():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/openapi.json") as response:
            described = await response.json()
        for path in ("/v1/models", "/v1/models/{model}", "/health", "/ping", "/load", "/version"):
            async with session.get(path.replace("{model}", "fake")) as response:
                assert response.status == 200
                answer = await response.json()
            schema = described["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            assert "$ref" in schema
            Draft202012Validator(schema | {"components": described["components"]}).validate(answer)


async def test_what_is_refused_it_does_not_allow():
    async for name, (status, answer), allowed in _answers(REFUSED):
        assert (status, answer["error"]["param"], allowed) == (400, REFUSED[name][2], False), (name, answer)


async def test_bad_input_is_not_allowed_either_or_it_cannot_be_said():
    cases = {name: case for name, case in BAD.items() if case[2] == 400 and _is_json(case[1]) and b"!" not in case[1]}
    assert len(cases) > 50
    async for name, (_, answer), allowed in _answers(cases, ignore_unknown=False):
        assert not allowed or any(part in answer["error"]["message"] for part in UNSAID), (name, answer)


async def test_the_document_as_a_page_names_every_route_and_field():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/openapi.json") as response:
            described = await response.json()
        async with session.get("/docs") as response:
            page = await response.text()
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        for path, operations in described["paths"].items():
            for method in operations:
                assert f"<code>{method.upper()} {path}</code>" in page
        for name in ("ChatBody", "CompletionBody", "MessagesBody"):
            for field in described["components"]["schemas"][name]["properties"]:
                assert f"<code>{field}</code>" in page
        assert "<script" not in page


async def test_the_configuration_is_told_to_this_machine():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/server_info") as response:
            assert (await response.json())["model"] == "fake"
        async with session.get("/server_info", headers={"Host": "evil.example"}) as response:
            assert response.status == 403

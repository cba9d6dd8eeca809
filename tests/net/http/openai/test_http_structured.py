"""Structured output as clients ask for it, down to what the frontend is asked."""

from __future__ import annotations

import aiohttp
import openai
import orjson
import pytest

from tests.net.fake_frontend import FakeFrontend, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SPELT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


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


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}}, 'json {"type": "object"}'),
        ({"response_format": FORMAT}, f"json {SPELT}"),
        ({"response_format": {"type": "regex", "pattern": "a|b"}}, "regex a|b"),
        ({"structured_outputs": {"json": SCHEMA}}, f"json {SPELT}"),
        ({"structured_outputs": {"json": SPELT}}, f"json {SPELT}"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex [ab]+"),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, 'choice ["ä","b"]'),
        ({"structured_outputs": {"json_object": True}}, 'json {"type": "object"}'),
        ({"guided_json": SCHEMA}, f"json {SPELT}"),
        ({"guided_regex": "a"}, "regex a"),
        ({"guided_choice": ["b"]}, 'choice ["b"]'),
        ({"guided_grammar": 'start: "a"'}, 'grammar start: "a"'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar root ::= x"),
    ],
)
async def test_spellings(client, frontend, body, grammar):
    messages = [{"role": "user", "content": "?"}]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=1, extra_body=body)
    await client.completions.create(model="fake", prompt="?", max_tokens=1, n=2, extra_body=body)
    assert [call["sampling"]["grammar"] for call in frontend.calls] == [grammar] * 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "!bad"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "!bad"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "text", "pattern": "a"}}, "response_format"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"pattern": "x"}}, "structured_outputs.pattern"),
    ],
)
async def test_refusals(client, frontend, body, param):
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="fake", prompt="?", extra_body=body)
    assert error.value.param == param and param.partition(".")[0] in str(error.value)
    assert not frontend.calls


SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
UNIQUE = {"properties": {"uniqueItems": SET, "b": {"uniqueItems": False, "default": {"uniqueItems": True}}}}
LIST = {"type": "array", "items": {"type": "string"}}
PLAIN = {"properties": {"uniqueItems": LIST, "b": {"default": {"uniqueItems": True}}}}


def of(schema: dict) -> str:
    return orjson.dumps(schema).decode()


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE}}},
        {"structured_outputs": {"json": UNIQUE}},
        {"guided_json": UNIQUE},
    ],
)
async def test_unique_items_are_ignored_and_named_like_an_unknown_field(frontend, client, body):
    answer = await client.completions.with_raw_response.create(model="fake", prompt="?", extra_body=body)
    assert frontend.calls[-1]["sampling"]["grammar"] == f"json {of(PLAIN)}"
    assert answer.headers["X-Ignored-Fields"] == "uniqueItems"


async def test_unique_items_of_a_forced_tool_are_ignored_and_the_template_sees_them(frontend, client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": SET}}]
    for choice, ignored in (("auto", None), ("required", "uniqueItems")):
        answer = await client.chat.completions.with_raw_response.create(
            model="fake", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice=choice
        )
        assert answer.headers.get("X-Ignored-Fields") == ignored
        assert frontend.rendered[-1][1]["tools"] == tools
    grammar = frontend.calls[-1]["sampling"]["grammar"]
    assert '"items":{"type":"string"}' in grammar and "uniqueItems" not in grammar


FORCED = {
    "/v1/responses": {
        "input": "?",
        "tools": [{"type": "function", "name": "f", "parameters": SET}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    "/v1/messages": {
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"name": "f", "input_schema": SET}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
}
FORM = {"input": "?", "text": {"format": {"type": "json_schema", "name": "x", "schema": SET}}}


@pytest.mark.parametrize(("route", "body"), [*FORCED.items(), ("/v1/responses", FORM)])
@pytest.mark.parametrize("ignored", [True, False])
async def test_the_other_routes_treat_unique_items_like_chats(route, body, ignored):
    frontend = FakeFrontend()
    async with (
        serving(frontend, ignore_unknown=ignored) as url,
        aiohttp.ClientSession(url) as session,
        session.post(route, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers.get("X-Ignored-Fields") == ("uniqueItems" if ignored else None)
    assert ("uniqueItems" in frontend.calls[-1]["sampling"]["grammar"]) != ignored


async def test_where_unknown_fields_are_refused_a_demand_for_unique_items_reaches_the_grammar_and_no_demand_does_not():
    frontend = FakeFrontend()
    async with serving(frontend, ignore_unknown=False) as url, aiohttp.ClientSession(url) as session:
        for schema, kept in ((SET, SET), (LIST | {"uniqueItems": False}, LIST)):
            async with session.post("/v1/completions", json={"prompt": "?", "guided_json": schema}) as response:
                assert response.status == 200 and "X-Ignored-Fields" not in response.headers
            assert frontend.calls[-1]["sampling"]["grammar"] == f"json {of(kept)}"

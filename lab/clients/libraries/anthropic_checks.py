"""anthropic's package on /v1/messages: messages, streams, tools, counts, errors."""

from __future__ import annotations

import asyncio
from typing import Any

from common import CITY_SCHEMA, MESSAGES, Server


def anthropic_messages(server: Server) -> None:
    client, asked = _anthropic(server)
    answer = client.messages.create(**asked)
    text = answer.content[0].text
    assert "Paris" in text and answer.stop_reason in ("end_turn", "max_tokens"), answer
    assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
    counted = client.messages.count_tokens(model=server.model, messages=MESSAGES)
    whole = client.messages.create(**(asked | {"max_tokens": 1})).usage
    assert counted.input_tokens == whole.input_tokens + (whole.cache_read_input_tokens or 0)
    stopped = client.messages.create(**(asked | {"stop_sequences": [text[3:6]], "system": "Be short."}))
    assert stopped.content and stopped.stop_reason in ("stop_sequence", "end_turn", "max_tokens")


def anthropic_async(server: Server) -> None:
    import anthropic

    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            answer: Any = await client.messages.create(model=server.model, messages=MESSAGES, max_tokens=8)
            return str(answer.content[0].text)

    assert asyncio.run(ask())


def anthropic_tools(server: Server) -> None:
    client, asked = _anthropic(server)
    tool = {"name": "weather", "description": "Weather of a city", "input_schema": CITY_SCHEMA}
    asked |= {"tools": [tool], "max_tokens": 64}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(**asked, tool_choice=choice)
        call = answer.content[-1]
        assert answer.stop_reason == "tool_use" and call.name == "weather" and call.input["city"] in ("Oslo", "Rome")
    with client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        assert stream.get_final_message().content[-1].input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**(asked | {"messages": turns, "tool_choice": {"type": "none"}})).stop_reason


def anthropic_errors(server: Server) -> None:
    import anthropic

    client, asked = _anthropic(server)
    for wrong, kind in (({"model": "no"}, anthropic.NotFoundError), ({"max_tokens": 0}, anthropic.BadRequestError)):
        try:
            client.messages.create(**(asked | wrong))
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error
        else:
            raise AssertionError(f"{wrong} was accepted")


def _anthropic(server: Server) -> tuple[Any, dict[str, Any]]:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120.0)
    return client, {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0.0}}

"""langchain-openai: chats, streams, batches, structured output, tools."""

from __future__ import annotations

import asyncio
from typing import Any

from common import QUESTION, City, Server, Weather, weather


def langchain_chat(server: Server) -> None:
    chat = _langchain(server)
    assert "Paris" in chat.invoke(QUESTION).content
    assert "Paris" in "".join(chunk.content for chunk in chat.stream(QUESTION))
    answers = chat.batch([QUESTION, "Say hello."])
    assert len(answers) == 2 and answers[0].usage_metadata["output_tokens"] > 0
    assert asyncio.run(chat.ainvoke(QUESTION)).content
    assert "Paris" in str(_langchain(server, use_responses_api=True).invoke(QUESTION).content)


def langchain_structured(server: Server) -> None:
    from langchain_core.tools import StructuredTool

    chat = _langchain(server, max_tokens=128)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke(QUESTION), City)
    tool = StructuredTool.from_function(weather, args_schema=Weather)
    (call,) = chat.bind_tools([tool], tool_choice="any", strict=True).invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")


def _langchain(server: Server, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    options: Any = {"max_tokens": 12, "temperature": 0, "max_retries": 0} | more
    return ChatOpenAI(model=server.model, **server.v1, **options)

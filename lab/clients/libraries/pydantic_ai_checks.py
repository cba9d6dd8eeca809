"""pydantic-ai over chats, responses and messages: text, output types, streams."""

from __future__ import annotations

import asyncio
from typing import Any

from common import QUESTION, City, Server


def pydantic_ai_outputs(server: Server) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    for model in _pydantic_models(server):
        settings: Any = {"max_tokens": 12, "temperature": 0.0}
        assert "Paris" in Agent(model, model_settings=settings).run_sync(QUESTION).output
        settings = {"max_tokens": 128, "temperature": 0.0}
        kinds: list[Any] = [ToolOutput(City)] + [NativeOutput(City)] * (type(model).__name__ != "AnthropicModel")
        for kind in kinds:
            output = Agent(model, output_type=kind, model_settings=settings).run_sync(QUESTION).output
            assert isinstance(output, City), (type(model), kind)


def pydantic_ai_stream(server: Server) -> None:
    from pydantic_ai import Agent

    async def run(model: Any) -> str:
        agent = Agent(model, model_settings={"max_tokens": 12, "temperature": 0.0})
        async with agent.run_stream(QUESTION) as streamed:
            return str(await streamed.get_output())

    assert all("Paris" in asyncio.run(run(model)) for model in _pydantic_models(server))


def _pydantic_models(server: Server) -> list[Any]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(**server.v1)
    others = AnthropicProvider(base_url=server.url, api_key="none")
    return [
        OpenAIChatModel(server.model, provider=provider),
        OpenAIResponsesModel(server.model, provider=provider),
        AnthropicModel(server.model, provider=others),
    ]

"""/v1/responses with the openai package, and openai-agents over both of its kinds of models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from common import CITY_SCHEMA, QUESTION, City, Server, weather


def openai_responses(server: Server) -> None:
    client = server.openai()
    asked: Any = {"model": server.model, "input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    text = client.responses.create(**asked).output_text
    assert "Paris" in text
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    parsed = client.responses.parse(**(asked | {"max_output_tokens": 96}), text_format=City)
    assert isinstance(parsed.output_parsed, City)
    tool = {"type": "function", "name": "weather", "parameters": CITY_SCHEMA}
    forced = client.responses.create(**(asked | {"max_output_tokens": 64}), tools=[tool], tool_choice="required")
    assert json.loads(forced.output[-1].arguments)["city"] in ("Oslo", "Rome")


def agents_run(server: Server) -> None:
    import agents

    for model in _agent_models(server):
        agent = agents.Agent("helper", model=model, model_settings=agents.ModelSettings(max_tokens=12, temperature=0))
        assert "Paris" in agents.Runner.run_sync(agent, QUESTION).final_output


def agents_tool_and_output(server: Server) -> None:
    import agents

    forced = agents.ModelSettings(max_tokens=96, temperature=0, tool_choice="required")
    for model in _agent_models(server):
        tool = agents.function_tool(weather)
        agent: Any = agents.Agent(
            "helper", model=model, tools=[tool], model_settings=forced, tool_use_behavior="stop_on_first_tool"
        )
        assert agents.Runner.run_sync(agent, QUESTION).final_output in ("rain in Oslo", "rain in Rome")
        agent = agents.Agent(
            "teller", model=model, output_type=City, model_settings=agents.ModelSettings(max_tokens=96, temperature=0)
        )
        assert isinstance(agents.Runner.run_sync(agent, QUESTION).final_output, City)


def agents_stream(server: Server) -> None:
    import agents

    async def run(model: Any) -> int:
        agent = agents.Agent("helper", model=model, model_settings=agents.ModelSettings(max_tokens=64, temperature=0))
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        return len([event async for event in streamed.stream_events()])

    assert all(asyncio.run(run(model)) > 3 for model in _agent_models(server))


def _agent_models(server: Server) -> list[Any]:
    import agents

    agents.set_tracing_disabled(True)
    kinds = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)
    return [kind(server.model, server.openai("AsyncOpenAI")) for kind in kinds]

"""litellm by three routes: openai, hosted_vllm and anthropic."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from common import CITY_SCHEMA, MESSAGES, City, Server


def litellm_routes(server: Server) -> None:
    import litellm

    routes = {"openai": f"{server.url}/v1", "hosted_vllm": f"{server.url}/v1", "anthropic": server.url}
    for route, base in routes.items():
        asked: Any = {"model": f"{route}/{server.model}", "api_base": base, "api_key": "none", "messages": MESSAGES}
        asked |= {"max_tokens": 12, "temperature": 0}
        answer: Any = litellm.completion(**asked)
        text = answer.choices[0].message.content
        assert "Paris" in text and answer.usage.completion_tokens > 0, (route, answer)
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
        assert "".join(pieces) == text, (route, pieces)


def litellm_structured(server: Server) -> None:
    import litellm

    asked: Any = {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    asked |= {"messages": MESSAGES, "max_tokens": 128, "temperature": 0}
    answer: Any = litellm.completion(**asked, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}
    answer = asyncio.run(litellm.acompletion(**asked, tools=[tool], tool_choice="required"))
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")

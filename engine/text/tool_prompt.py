"""Tools for a model whose chat template has none: described in the system message, calls and results as text. Pure.

The form is that of Hermes and Qwen, which net/http/openai/tools.py parses in answers. A model that was not trained for
it often answers in plain text; a grammar enforces the form of a forced call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.spelt_json import spelt_json

Message = dict[str, Any]


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """`messages` with all tools, calls and results converted to plain text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    first = plain[0] if plain[0]["role"] == "system" else None
    text = _offer(tools) if first is None else f"{first['content'] or ''}\n\n{_offer(tools)}"
    return [{"role": "system", "content": text}, *(plain if first is None else plain[1:])]


def _offer(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(spelt_json(tool) for tool in tools)
    example = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    return f"You can call these functions:\n<tools>\n{listed}\n</tools>\nA call is written as\n{example}"


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content'] or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{spelt_json(_call(call))}\n</tool_call>" for call in message["tool_calls"]]
    words = [message["content"]] if message["content"] else []
    return {"role": message["role"], "content": "\n".join(words + calls)}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function.get("arguments", {})}

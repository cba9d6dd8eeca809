"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to the body of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from net.http.openai.fields import WHOLE, AtLeast1, Known
from net.http.openai.messages import few_messages
from net.http.openai.schema import MAX_STOP_CHARS, MAX_STOP_STRINGS, Body, ChatBody
from net.http.openai.tools import MAX_TOOLS, only_of

Json = dict[str, Any]


class Turn(Known):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CustomTool(Known):
    """`cache_control` is accepted: every prefix is cached anyway."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolChoice(Known):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of type tool
    disable_parallel_tool_use: bool = False


Turns = Annotated[list[Turn], Field(min_length=1), BeforeValidator(few_messages)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Question(Body, BaseModel):
    """What both routes read."""

    model: str = ""
    messages: Turns
    system: str | list[dict[str, Any]] = ""
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS), only_of("custom")] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: dict[str, Any] | None = None  # accepted: the served model thinks as its template says

    def chat(self, ignored: list[str] | None = None, **fields: Any) -> ChatBody:
        """The same question as a chat with these further fields; `ignored`: as in net/http/common/body.py. Raises
        ValueError naming the field."""
        messages: list[Json] = []
        if system := _joined(self.system, "system"):
            messages.append({"role": "system", "content": system})
        for at, turn in enumerate(self.messages):
            _READERS[turn.role](messages, turn.content, f"messages: turn {at}")
        if self.messages[-1].role == "assistant":
            raise ValueError("messages: the last turn must be of the user; this server does not continue an answer")
        tools = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        parallel = not self.tool_choice.disable_parallel_tool_use
        known: Json = {"model": self.model, "messages": messages, "tools": tools, "tool_choice": self._choice()}
        return ChatBody.model_validate(known | {"parallel_tool_calls": parallel} | fields, context=ignored)

    def _choice(self) -> str | Json:
        kind, name = self.tool_choice.type, self.tool_choice.name
        if kind == "tool":
            return {"type": "function", "function": {"name": name}}
        return {"auto": "auto", "any": "required", "none": "none"}[kind]


class MessagesBody(Question, BaseModel):
    """POST /v1/messages"""

    max_tokens: AtLeast1
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] = []
    stream: bool = False
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**63), WHOLE] = 0

    def as_chat(self, ignored: list[str] | None = None) -> ChatBody:
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        lengths = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}
        return self.chat(ignored, **sampling, **lengths)


class CountBody(Question, BaseModel):
    """POST /v1/messages/count_tokens"""


def _function(tool: CustomTool) -> Json:
    told = {"name": tool.name, "parameters": tool.input_schema}
    return told if tool.description is None else told | {"description": tool.description}


def _joined(content: Any, where: str) -> str:
    """The text of a string or of a list of text blocks. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} needs a text or a list of text blocks")
    texts = [
        block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None for block in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'{where}: every block must be {{"type": "text", "text": "..."}}; this model reads only text')
    return "\n".join(map(str, texts))


def _said(messages: list[Json], content: str | list[Json], where: str) -> None:
    """A turn of the user: results of tools, and text."""
    texts: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else []
    for block in content if isinstance(content, list) else ():
        if block.get("type") == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise ValueError(f"{where}: a tool_result needs the tool_use_id of its call")
            told = block.get("content")
            result = "" if told is None else _joined(told, f"{where}, tool_result")
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        else:
            texts.append(block)
    if texts:
        messages.append({"role": "user", "content": _joined(texts, where)})


def _answered(messages: list[Json], content: str | list[Json], where: str) -> None:
    """An earlier answer: text and calls; its thinking is left out, because templates have no place for it."""
    texts: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else []
    calls = []
    for block in content if isinstance(content, list) else ():
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise ValueError(f"{where}: a tool_use needs a name and an input")
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    message: Json = {"role": "assistant", "content": _joined(texts, where)}
    messages.append(message | {"tool_calls": calls} if calls else message)


_READERS: dict[str, Callable[[list[Json], str | list[Json], str], None]] = {"user": _said, "assistant": _answered}

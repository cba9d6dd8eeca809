"""Body of POST /v1/responses, and its conversion to the body of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from net.http.openai.fields import AtLeast1, Known
from net.http.openai.messages import few_messages
from net.http.openai.schema import Body, ChatBody
from net.http.openai.tools import MAX_TOOLS, only_of

Json = dict[str, Any]


class FunctionTool(Known):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a forced call always follows the parameters


class TextFormat(Known):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Known):
    format: TextFormat = TextFormat()
    verbosity: str | None = None


_KEPT = ("previous_response_id", "conversation", "prompt")
"""Fields that name what OpenAI's servers keep."""

Items = Annotated[list[dict[str, Any]], BeforeValidator(few_messages)]


class ResponsesBody(Body, BaseModel):
    """POST /v1/responses. The server keeps no answers: `store` is ignored, and a conversation is sent whole."""

    model: str = ""
    input: Annotated[str, Field(min_length=1)] | Items
    instructions: str | None = None
    max_output_tokens: AtLeast1 | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), only_of("function")] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    stream: bool = False
    background: Literal[False] = False
    truncation: Literal["disabled", "auto"] = "disabled"
    top_logprobs: Literal[0] = 0
    include: list[Any] = []
    reasoning: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, body: Any) -> Any:
        for name in _KEPT if isinstance(body, dict) else ():
            if body.get(name) is not None:
                raise ValueError(f"{name} is not supported by this server, which keeps no answers; send all as input")
        return body

    def chat(self, ignored: list[str] | None = None) -> ChatBody:
        """The same question as a chat; `ignored`: as in net/http/common/body.py. Raises ValueError naming the field."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for at, item in enumerate(self.input):
                _append(messages, item, at)
        tools = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        fields: Json = {"messages": messages, "tools": tools, "tool_choice": self._choice()}
        fields |= {"model": self.model, "temperature": self.temperature, "top_p": self.top_p, "stream": self.stream}
        fields |= {"parallel_tool_calls": self.parallel_tool_calls, "cache_salt": self.cache_salt}
        fields |= {"max_tokens": self.max_output_tokens, "response_format": self._format()}
        fields |= {"truncate_prompt_tokens": -1 if self.truncation == "auto" else None}
        return ChatBody.model_validate(fields, context=ignored)

    def _choice(self) -> str | Json:
        choice = self.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
                raise ValueError('tool_choice: must be auto, none, required or {"type": "function", "name": ..}')
            return {"type": "function", "function": {"name": choice["name"]}}
        return choice

    def _format(self) -> Json | None:
        form = self.text.format
        if form.type != "json_schema":
            return {"type": form.type}
        if form.schema_ is None:
            raise ValueError("text: format.schema is missing")
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _function(tool: FunctionTool) -> Json:
    told = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {name: value for name, value in told.items() if value is not None}


def _append(messages: list[Json], item: Json, at: int) -> None:
    """Add an item of `input` to a chat. Raises ValueError."""
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"input: item {at} has a type that is not served; it must be one of {', '.join(_READERS)}")
    _READERS[kind](messages, item, f"input: item {at}")


def _message(messages: list[Json], item: Json, where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise ValueError(f"{where} needs a role: user, assistant, system or developer")
    text = _text(item.get("content"), where)
    messages.append({"role": "system" if role == "developer" else role, "content": text})


def _call(messages: list[Json], item: Json, where: str) -> None:
    """Calls of one answer become one message."""
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise ValueError(f"{where} needs the texts call_id, name and arguments")
    call = {"id": item["call_id"], "type": "function"}
    call |= {"function": {"name": item["name"], "arguments": item["arguments"]}}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _result(messages: list[Json], item: Json, where: str) -> None:
    if not isinstance(item.get("call_id"), str):
        raise ValueError(f"{where} needs the call_id of its call")
    text = _text(item.get("output"), where)
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})


def _nothing(messages: list[Json], item: Json, where: str) -> None:
    """Reasoning of an earlier answer: templates have no place for it."""


_READERS: dict[str, Callable[[list[Json], Json, str], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _nothing,
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} needs a text or a list of text parts")
    texts = [part.get(_TEXTS.get(str(part.get("type")), "")) if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'{where}: every part must be {{"type": "input_text", "text": "..."}}; this model reads text')
    return "\n".join(map(str, texts))

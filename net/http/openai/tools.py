"""Tools of a chat: the client's definitions, and the calls in the model's text.

A model whose chat template describes tools writes, between other text,

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

as Hermes, Qwen and many others do. Anything else between the tags stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from net.http.common.bounds import MAX_DEPTH, deeper_than
from net.http.openai.fields import Known
from net.http.openai.unique_items import without_unique_items

BEGIN, END = "<tool_call>", "</tool_call>"
ESCAPED = re.compile(r"\\.", re.DOTALL)  # in a string of JSON
MAX_TOOLS = 128

Json = dict[str, Any]


class Function(BaseModel):
    """The template shows it to the model; `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Known):
    type: Literal["function"]
    function: Function


def only_of(kind: str) -> BeforeValidator:
    """Validator of a list of tools for APIs in which tools have other types too, which the API's own servers run
    (web search, a shell). They are treated like unknown fields: ignored and named, or left to the check of the type."""

    def served(tools: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(tools, list):
            return tools
        types = [tool.get("type", kind) if isinstance(tool, dict) else kind for tool in tools]
        foreign = [isinstance(found, str) and found != kind for found in types]
        info.context.extend(f"tools.{found}" for found, left_out in zip(types, foreign, strict=True) if left_out)
        return [tool for tool, left_out in zip(tools, foreign, strict=True) if not left_out]

    return BeforeValidator(served)


def spelt_for_templates(calls: Any) -> Any:
    """tool_calls of an earlier answer with their arguments as objects: clients return the JSON text that they received,
    but templates write the JSON themselves. Raises ValueError for arguments that are not JSON."""
    if not isinstance(calls, list):
        raise ValueError("tool_calls must be a list")
    return [_with_object(call) for call in calls]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('each element of tool_calls must be {"function": {"name": "...", "arguments": "..."}, ...}')
    arguments, name = function.get("arguments"), function["name"][:80]
    if not isinstance(arguments, str):
        return call
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise ValueError(f"tool_calls: arguments of {name!r} are not JSON: {error}") from None
    if deeper_than(MAX_DEPTH, parsed):
        raise ValueError(f"tool_calls: arguments of {name!r} are nested more than {MAX_DEPTH} levels deep")
    return {**call, "function": {**function, "arguments": parsed}}


def schema_of_call(tools: Sequence[Tool], lenient: bool = False) -> str:
    """JSON schema of a call of one of `tools`. The parameters of each tool are a schema resource with an `$id` of its
    own: a pointer in them (`#/$defs/City`, `#`) means a part of these parameters, not of the call. lenient: without
    uniqueItems."""

    def one(at: int, tool: Tool) -> Json:
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{at}"}}
        required = ["name", "arguments"]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    parameters = {
        str(at): _resource(without_unique_items(tool.function.parameters or {"type": "object"}, lenient), at)
        for at, tool in enumerate(tools)
    }
    call = {"anyOf": [one(at, tool) for at, tool in enumerate(tools)], "$defs": parameters}
    return orjson.dumps(call).decode()


def _resource(schema: Json, at: int) -> Json:
    """`schema` under an `$id` of its own, also in older drafts: up to draft 7, a `$ref` hides its neighbours, and draft
    4 knows no `$id`, so its schemas are read as current ones."""
    draft = str(schema.get("$schema", ""))
    named: Json = {"$id": f"urn:mooncake:tool:{at}"}
    dropped = ""
    if "/draft-04" in draft:
        dropped = "$schema"
    elif "/draft-0" in draft and "$ref" in schema:
        dropped, named["allOf"] = "$ref", [{"$ref": schema["$ref"]}]
    return {key: value for key, value in schema.items() if key != dropped} | named


class ToolText:
    """Splits a streamed answer into content and calls. `most`: calls to return; everything after them is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = ""  # inside: the call so far; outside: a possible beginning of BEGIN
        self._inside = False
        self.calls = 0  # returned so far

    def feed(self, text: str, last: bool) -> tuple[str, list[Json]]:
        """(content, calls in the form of a delta) that `text` adds; `last`: the answer ends with `text`."""
        if self.calls >= self._most:
            return "", []
        text, self._held = self._held + text, ""
        content, calls = "", []
        while text:
            before, tag, behind = _divided(text, last) if self._inside else text.partition(BEGIN)
            if not tag and not last:
                keep = len(text) if self._inside else _overlap(text)
                content, self._held = content + text[: len(text) - keep], text[len(text) - keep :]
                break
            # An answer may end without END: models stop when the call is complete.
            call = _call(before, self.calls) if self._inside else None
            if call is None:
                content += BEGIN + before + tag if self._inside else before
            else:
                calls.append(call)
                self.calls += 1
                if self.calls == self._most:
                    return content, calls
            self._inside = bool(tag) and not self._inside
            text = behind
        if last and self._inside:
            content += BEGIN
        return content, calls


def _divided(text: str, last: bool) -> tuple[str, str, str]:
    """(the call at the begin of `text`, END, what follows); without END if the call goes on. END in a string of the
    call is a part of it."""
    at = text.find(END)
    while at >= 0 and len(ESCAPED.sub("", text[:at]).split('"')) % 2 == 0:  # an odd number of quotes
        at = text.find(END, at + 1)
    if at < 0 and not last:
        return text, "", ""
    end = len(text) if at < 0 else at
    whole = _call(text[:end], 0) is not None
    return (text[:end], text[end : end + len(END)], text[end + len(END) :]) if whole else text.partition(END)


def _call(text: str, index: int) -> Json | None:
    """The call in `text`, or None if `text` is not a call."""
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = parsed.get("arguments", {})
    try:
        spelt = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # nested deeper than it writes
        return None
    function = {"name": parsed["name"], "arguments": spelt}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    """The number of last characters of `text` that may begin a call."""
    return next((n for n in range(min(len(BEGIN) - 1, len(text)), 0, -1) if BEGIN.startswith(text[-n:])), 0)

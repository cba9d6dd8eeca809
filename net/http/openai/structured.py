"""Structured output in requests: OpenAI's response_format, vLLM's structured_outputs and its older guided_*."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from net.http.openai.unique_items import KEYWORD, asks_for_unique_items, without_unique_items

ANY_OBJECT = '{"type": "object"}'

Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the answer always follows the schema


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None  # of type regex

    @model_validator(mode="after")
    def _with_its_own(self) -> ResponseFormat:
        for field, kind in (("json_schema", "json_schema"), ("pattern", "regex")):
            if (getattr(self, field) is not None) != (self.type == kind):
                raise ValueError(f"{field} is allowed only with type {kind}")
        return self

    def structure(self, lenient: bool) -> tuple[str, str | None]:
        """(kind, source) for Frontend.compile_grammar; source None: any answer. lenient: without uniqueItems."""
        if self.type == "regex":
            return "regex", self.pattern
        if self.type == "text":
            return "json", None
        return "json", ANY_OBJECT if self.json_schema is None else _schema(self.json_schema.schema_, lenient)


class StructuredOutputs(BaseModel):
    """At most one field may be set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None  # of the whole answer; Rust's syntax, without look-around
    choice: Choices | None = None
    grammar: str | None = None  # in Lark's or GBNF's syntax
    json_object: bool | None = None

    @field_validator("json_object")
    @classmethod
    def _true(cls, value: bool | None) -> bool | None:
        if value is False:
            raise ValueError("must be true, or left out")
        return value


class Structured(BaseModel):
    """The fields of a body that ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    _lenient: bool = PrivateAttr(default=False)

    @property
    def lenient(self) -> bool:
        """Whether uniqueItems is ignored."""
        return self._lenient

    @property
    def schemas(self) -> list[Any]:
        """The JSON schemas that the answer follows."""
        outputs, form = self.structured_outputs, self.response_format
        of_form = None if form is None or form.json_schema is None else form.json_schema.schema_
        return [self.guided_json, None if outputs is None else outputs.json_, of_form]

    @model_validator(mode="after")
    def _unique_items(self, info: ValidationInfo) -> Self:
        """Treats uniqueItems like an unknown field: see net/http/openai/fields.py."""
        if info.context is not None and asks_for_unique_items(self.schemas):
            self._lenient = True
            info.context.append(KEYWORD)
        return self

    @property
    def structure(self) -> tuple[str, str, str] | None:
        """(field, kind, source); kind and source for Frontend.compile_grammar. Raises ValueError if the body requests
        two structures."""
        of_form = self.response_format.structure(self._lenient) if self.response_format else ("json", None)
        asked: list[tuple[str, str, str | None]] = [
            ("guided_json", "json", _schema(self.guided_json, self._lenient)),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", _json(self.guided_choice)),
            ("guided_grammar", "grammar", self.guided_grammar),
            *_of_outputs(self.structured_outputs, self._lenient),
            ("response_format", *of_form),
        ]
        found = [(field, kind, source) for field, kind, source in asked if source is not None]
        if len(found) > 1:
            raise ValueError(
                f"{found[1][0]}: this body requests structured output twice; the other field is {found[0][0]}"
            )
        return found[0] if found else None


def _of_outputs(outputs: StructuredOutputs | None, lenient: bool) -> list[tuple[str, str, str | None]]:
    if outputs is None:
        return []
    parts = [
        ("json", _schema(outputs.json_, lenient)),
        ("regex", outputs.regex),
        ("choice", _json(outputs.choice)),
        ("grammar", outputs.grammar),
        ("json", ANY_OBJECT if outputs.json_object else None),
    ]
    return [("structured_outputs", kind, source) for kind, source in parts]


def _schema(value: Schema | None, lenient: bool) -> str | None:
    return _json(without_unique_items(value, lenient))


def _json(value: Schema | list[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()

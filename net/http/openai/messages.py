"""Chat messages in requests: their content as text, and the calls of earlier answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from net.http.openai.tools import spelt_for_templates


def _text_of(part: Any) -> str:
    """The text of a content part. Raises ValueError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise ValueError('every content part must be {"type": "text", "text": "..."}, or a refusal in the same form')
    return str(part[kind])


class Message(BaseModel):
    """One chat message; fields other than role and content are passed to the template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None  # of an earlier answer

    @field_validator("tool_calls")
    @classmethod
    def _as_objects(cls, calls: list[Any] | None) -> list[Any] | None:
        return None if calls is None else spelt_for_templates(calls)

    @model_validator(mode="before")
    @classmethod
    def _always_text(cls, message: Any) -> Any:
        """A message without content, such as a call, has an empty one for templates; a refusal has its text."""
        if not isinstance(message, dict) or message.get("content") is not None:
            return message
        refusal = message.get("refusal")
        return message | {"content": refusal if isinstance(refusal, str) else ""}

    @field_validator("content")
    @classmethod
    def _text_only(cls, content: str | list[Any] | None) -> str | None:
        """Content parts become one string: templates of text models expect a string."""
        return "\n".join(map(_text_of, content)) if isinstance(content, list) else content


MAX_MESSAGES = 4096
"""Per conversation: 15 ms until the template gets them."""


def few_messages(messages: Any) -> Any:
    """Counts the messages before they are checked one by one."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(f"a conversation has at most {MAX_MESSAGES} messages, got {len(messages)}")
    return messages


Conversation = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(few_messages)
]

"""Prompts as token ids, within the limits of the model and of one request: texts, ids, rendered conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from net.http.common.errors import ApiError, bad_request
from net.http.common.frontend import Frontend
from net.http.openai.messages import Message
from net.http.openai.schema import Generation
from net.http.openai.tools import Tool

LONG_TEXT_CHARS = 4_000
"""Longer texts are tokenised in a thread, so that other requests' tokens keep flowing: 4,000 characters take 0.7 ms."""

MAX_TEXT_CHARS = 2_000_000
"""Characters of one text. The tokenizer holds the interpreter lock while it makes the list of ids: 30 ms at one token
per character. For longer contexts the limit is MAX_CHARS_PER_TOKEN per token of the context."""

MAX_CHARS_PER_TOKEN = 8

MESSAGE_CHARS = 50
"""Cost of a message in addition to its text, in characters of text."""

T = TypeVar("T")


def check_model(frontend: Frontend, model: str) -> None:
    """Raises 404 unless `model` is empty or the served one."""
    if model and model != frontend.model_name:
        message = f"The model `{model[:200]}` does not exist; this server serves `{frontend.model_name}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_ids(frontend: Frontend, token_ids: Collection[int], param: str) -> None:
    """Raises 400 for an id outside the vocabulary."""
    for bad in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= bad < frontend.vocab_size:
            raise bad_request(f"{param}: token id {bad} is not in the vocabulary (0..{frontend.vocab_size - 1})", param)


def check_text(frontend: Frontend, size: int, param: str) -> None:
    """Raises 413 if `size` characters of text, or `size` bytes of messages, are too long to tokenise."""
    most = max(MAX_TEXT_CHARS, MAX_CHARS_PER_TOKEN * frontend.max_model_len)
    if size > most:
        message = f"{param}: {size} characters exceed the {most} that this server tokenises per request; send parts"
        raise ApiError(413, message, param=param, code="request_too_large")


async def unhurried(size: int, work: Callable[[], T]) -> T:
    """work(), in a thread if its input of `size` characters is long."""
    return work() if size < LONG_TEXT_CHARS else await asyncio.to_thread(work)


async def render_messages(
    frontend: Frontend,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    arguments: dict[str, Any],
    tools: Sequence[Tool],
    size: int,
) -> list[int]:
    """Token ids of a chat. `size`: bytes of the body. Raises ApiError 400 if the template refuses messages or
    arguments, or is the client's and not trusted; 413 if they are too long."""

    own = "chat_template" in arguments
    if own and not frontend.trusts_chat_templates:
        message = "this server serves no template of clients (--trust-request-chat-template); leave it out"
        raise bad_request(f"chat_template: {message}", "chat_template")
    check_text(frontend, size, "messages")
    if len(messages) > frontend.max_model_len:  # each has at least one token
        raise too_long(frontend, f"{len(messages)} messages", "messages")

    def rendered() -> list[int]:
        offered = {"tools": [tool.model_dump(exclude_unset=True) for tool in tools]} if tools else {}
        kwargs = {"add_generation_prompt": add_generation_prompt, **arguments, **offered}
        return frontend.render_chat([message.model_dump(exclude_unset=True) for message in messages], **kwargs)

    try:
        return await unhurried(LONG_TEXT_CHARS if own else size + MESSAGE_CHARS * len(messages), rendered)
    except (ValueError, TypeError) as error:  # TypeError: the client's arguments do not fit the template
        raise bad_request(f"messages: {error}", "messages") from error


def check_length(frontend: Frontend, token_ids: list[int], param: str) -> int:
    """The number of tokens that may follow the prompt: at least one, else raises 400."""
    if not token_ids:
        raise bad_request(f"{param} is empty", param)
    if len(token_ids) >= frontend.max_model_len:
        raise too_long(frontend, f"{len(token_ids)} in the {param} and at least one to generate", param)
    return frontend.max_model_len - len(token_ids)


def too_long(frontend: Frontend, wanted: str, param: str) -> ApiError:
    message = f"This model's maximum context length is {frontend.max_model_len} tokens; you asked for {wanted}."
    return bad_request(message, param, "context_length_exceeded")


def truncated(frontend: Frontend, body: Generation, ids: list[int], max_tokens: int | None) -> list[int]:
    """The last tokens of a prompt, as many as the client wants; for -1, as many as leave room for `max_tokens`."""
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    if most == -1:
        most = max(1, frontend.max_model_len - max(1, max_tokens or 1))
    return ids[-most:] if most else []

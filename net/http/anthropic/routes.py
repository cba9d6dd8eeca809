"""POST /v1/messages and /v1/messages/count_tokens: the answer of a chat, whole and as events."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from net.http.anthropic.schema import CountBody, MessagesBody, Question
from net.http.common.body import read_body
from net.http.common.errors import ApiError, from_validation, naming
from net.http.common.unknown import ignored_key
from net.http.openai.blocks import Block, BlockAnswer
from net.http.openai.plan import Plan, plan_chat
from net.http.openai.prompts import check_model, render_messages, unhurried
from net.http.openai.routes import with_class
from net.http.openai.schema import ChatBody
from net.http.openai.serving import Serving
from net.http.openai.sse import Event

Json = dict[str, Any]

REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}


class Messages:
    """The handlers."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: web.Request) -> web.StreamResponse:
        async def plan(body: MessagesBody, size: int) -> Plan:
            chat = with_class(request, await _chat(request, body, size))
            return await plan_chat(self._serving.frontend, chat, size)

        body, planned = await self._serving.planned(request, MessagesBody, plan)

        def rendered(request_id: str) -> MessageAnswer:
            return MessageAnswer(self._serving.frontend, planned, request_id)

        return await self._serving.answer(request, planned, body.stream, rendered)

    async def count_tokens(self, request: web.Request) -> web.Response:
        body, size = await read_body(request, CountBody)
        chat, frontend = await _chat(request, body, size), self._serving.frontend
        check_model(frontend, chat.model)
        ids = await render_messages(frontend, chat.messages, True, {}, chat.offered, size)
        return web.Response(body=orjson.dumps({"input_tokens": len(ids)}), content_type="application/json")


async def _chat(request: web.Request, body: Question, size: int) -> ChatBody:
    """Raises ApiError 400."""
    chat = body.as_chat if isinstance(body, MessagesBody) else body.chat
    try:
        return await unhurried(size, partial(chat, request.get(ignored_key)))
    except ValidationError as error:
        raise from_validation(error) from None
    except ValueError as error:
        raise naming(str(error)) from None


class MessageAnswer(BlockAnswer):
    """One message. Its id is msg_ and the request's id, so that a timeline is found by it."""

    def begin(self) -> list[Event]:
        return [_event("message_start", message=self._message([])), _event("ping")]

    def added(self, block: Block) -> list[Event]:
        opened = _event("content_block_start", index=self.at, content_block=_content(block, empty=True))
        return (
            [
                opened,
                self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(_input(block.text)).decode()}),
            ]
            if block.name
            else [opened]
        )

    def text(self, text: str) -> list[Event]:
        return [self._delta({"type": "text_delta", "text": text})]

    def ended(self, block: Block) -> list[Event]:
        return [_event("content_block_stop", index=self.at)]

    def last_events(self) -> list[Event]:
        message = self._message([])
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [_event("message_delta", delta=ended, usage=message["usage"]), _event("message_stop")]

    def failure(self, error: ApiError) -> Event:
        return "error", error.body()

    def whole(self) -> Json:
        return self._message(self.blocks)

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=self.at, delta=delta)

    def _message(self, blocks: list[Block]) -> Json:
        counts = self.usage.json()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        stop = self.stopped_by if isinstance(self.stopped_by, str) and self.reason == "stop" else None
        ended = REASONS.get(self.reason, "end_turn") if self.reason else None
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_content(block) for block in blocks],
            "stop_reason": ended if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {
                "input_tokens": counts["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": counts["completion_tokens"],
            },
        }


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _content(block: Block, empty: bool = False) -> Json:
    if not block.name:
        return {"type": "text", "text": "" if empty else block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {} if empty else _input(block.text)}


def _input(arguments: str) -> Json:
    """Arguments as the object that clients expect. Anything else that the model wrote becomes its field `arguments`."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}

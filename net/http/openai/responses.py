"""POST /v1/responses: the answer of a chat in the format of OpenAI's newer API, whole and as events."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from net.http.common.errors import ApiError, from_validation, naming
from net.http.common.frontend import Frontend, Output
from net.http.common.pieces import Prepared
from net.http.common.unknown import ignored_key
from net.http.openai.blocks import Block, BlockAnswer
from net.http.openai.plan import Plan, plan_chat
from net.http.openai.prompts import unhurried
from net.http.openai.responses_schema import ResponsesBody, TextFormat
from net.http.openai.routes import with_class
from net.http.openai.serving import Serving
from net.http.openai.sse import Event

Json = dict[str, Any]
Echo = dict[str, Prepared]
"""Fields of the answer that repeat fields of the body, which may be large."""

ENDS = {"length": ("incomplete", "max_output_tokens"), "abort": ("incomplete", "abort")}
"""finish_reason -> (status, why it is incomplete)."""


class Responses:
    """The handler."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: web.Request) -> web.StreamResponse:
        async def plan(body: ResponsesBody, size: int) -> tuple[Plan, Echo]:
            try:
                chat = await unhurried(size, partial(body.chat, request.get(ignored_key)))
            except ValidationError as error:
                raise from_validation(error) from None
            except ValueError as error:
                raise naming(str(error)) from None
            planned = await plan_chat(self._serving.frontend, with_class(request, chat), size)
            return planned, await unhurried(size, partial(_echo, body))

        body, (planned, echo) = await self._serving.planned(request, ResponsesBody, plan)
        created = int(time.time())

        def rendered(request_id: str) -> ResponseAnswer:
            return ResponseAnswer(self._serving.frontend, planned, request_id, body, echo, created)

        return await self._serving.answer(request, planned, body.stream, rendered)


class ResponseAnswer(BlockAnswer):
    """One response. Its id is resp_ and the request's id, so that a timeline is found by it."""

    def __init__(
        self, frontend: Frontend, plan: Plan, request_id: str, body: ResponsesBody, echo: Echo, created: int
    ) -> None:
        super().__init__(frontend, plan, request_id)
        self._body, self._echo, self._created, self._sent = body, echo, created, 0
        self.last_size = sum(value.size for value in echo.values())

    def size_of(self, choice: int, output: Output) -> int:
        """The first events show the request."""
        return super().size_of(choice, output) + (0 if self._begun else self.last_size)

    def begin(self) -> list[Event]:
        started = self._response("in_progress")
        return [self._event("created", response=started), self._event("in_progress", response=started)]

    def added(self, block: Block) -> list[Event]:
        empty = Block(block.name, block.call_id)
        opened = [self._item_event("output_item.added", item=self._item(self.at, empty, "in_progress"))]
        if block.name:
            told = [self._of_item("function_call_arguments.delta", delta=block.text)]
            return [
                *opened,
                *told,
                self._of_item("function_call_arguments.done", arguments=block.text, name=block.name),
            ]
        return [*opened, self._of_item("content_part.added", content_index=0, part=_part(""))]

    def text(self, text: str) -> list[Event]:
        return [self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[])]

    def ended(self, block: Block) -> list[Event]:
        """Events are numbered in the order in which they are made."""
        told: list[Event] = []
        if not block.name:
            told.append(self._of_item("output_text.done", content_index=0, text=block.text, logprobs=[]))
            told.append(self._of_item("content_part.done", content_index=0, part=_part(block.text)))
        return [*told, self._item_event("output_item.done", item=self._item(self.at, block, "completed"))]

    def last_events(self) -> list[Event]:
        status = self._status
        return [self._event(status, response=self._response(status))]

    def failure(self, error: ApiError) -> Event:
        told = self._response("failed") | {"error": {"code": error.code or "server_error", "message": error.message}}
        return self._event("failed", response=told)

    def whole(self) -> Json:
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return ENDS.get(self.reason, ("completed", ""))[0]

    def _event(self, event: str, /, **data: Any) -> Event:
        kind, number = f"response.{event}", self._sent
        self._sent += 1
        return kind, {"type": kind, "sequence_number": number, **data}

    def _item_event(self, event: str, /, **data: Any) -> Event:
        return self._event(event, output_index=self.at, **data)

    def _of_item(self, event: str, /, **data: Any) -> Event:
        return self._item_event(event, item_id=self._item_id(self.at, self.blocks[-1]), **data)

    def _item_id(self, at: int, block: Block) -> str:
        return f"{'fc' if block.name else 'msg'}_{self.request_id}_{at}"

    def _item(self, at: int, block: Block, status: str) -> Json:
        head = {"id": self._item_id(at, block), "status": status}
        if block.name:
            called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return head | {"type": "function_call"} | called
        content = [] if status == "in_progress" else [_part(block.text)]
        return head | {"type": "message", "role": "assistant", "content": content}

    def _response(self, status: str) -> Json:
        body, counts = self._body, self.usage.json()
        over = status != "in_progress"
        why = ENDS.get(self.reason, ("", ""))[1]
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": why} if why else None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": [self._item(at, block, "completed") for at, block in enumerate(self.blocks)] if over else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": usage if over else None,
            **self._echo,
        }


def _echo(body: ResponsesBody) -> Echo:
    form = body.text.format
    given = {"type", *form.model_fields_set}
    fields = {
        field.alias or name: getattr(form, name) for name, field in TextFormat.model_fields.items() if name in given
    }
    return {
        "instructions": Prepared(body.instructions),
        "text": Prepared({"format": fields}),
        "tool_choice": Prepared(body.tool_choice),
        "tools": Prepared([dict(tool) for tool in body.tools]),
    }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

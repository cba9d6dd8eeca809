"""The two completion routes, streamed and whole."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson
from aiohttp import web

from net.http.common.body import read_body
from net.http.common.errors import ApiError, from_exception
from net.http.common.frontend import Frontend, Output
from net.http.common.middleware import request_id_key
from net.http.common.pieces import SMALL_VALUES, answer, encoded, in_turns
from net.http.openai.plan import Plan, plan_chat, plan_completion
from net.http.openai.render import ChatRenderer, CompletionRenderer, Json, Renderer
from net.http.openai.schema import SERVICE_CLASSES, ChatBody, CompletionBody, Generation
from net.http.openai.streams import Item, run

CLASS_HEADER = "X-Mooncake-Class"
RESUME_HEADER = "X-Resume-From"
"""Number of output tokens already received, when a client repeats a request with its X-Request-Id after the answering
node was lost."""

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: forward events immediately
}
DONE = b"data: [DONE]\n\n"

BodyT = TypeVar("BodyT", bound=Generation)


class OpenAI:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._in_flight: set[str] = set()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body, size = await read_body(request, CompletionBody)
        plan = await plan_completion(self._frontend, _with_class(request, body), size)
        return await self._answer(request, body, plan, CompletionRenderer)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body, size = await read_body(request, ChatBody)
        plan = await plan_chat(self._frontend, _with_class(request, body), size)
        return await self._answer(request, body, plan, ChatRenderer)

    async def _answer(
        self, request: web.Request, body: Generation, plan: Plan, renderer_class: type[Renderer]
    ) -> web.StreamResponse:
        plan = _resumed(request, plan)
        with self._unique_id(request[request_id_key]) as request_id:
            renderer = renderer_class(self._frontend, plan, request_id, int(time.time()), body.return_token_ids)
            # The server cancels this task when the client disconnects; `aclosing` then closes every generation.
            async with aclosing(run(self._frontend, plan, request_id)) as items:
                if body.stream:
                    return await _stream(request, body, renderer, items)
                async for choice, output in items:
                    renderer.collect(choice, output)
            return answer(await encoded(renderer.size, renderer.whole))

    @contextmanager
    def _unique_id(self, request_id: str) -> Iterator[str]:
        """Makes the id unique: a client may send the same X-Request-Id twice at the same time (a retry)."""
        if request_id in self._in_flight:
            request_id = f"{request_id}-{secrets.token_hex(4)}"
        self._in_flight.add(request_id)
        try:
            yield request_id
        finally:
            self._in_flight.discard(request_id)


async def _stream(
    request: web.Request, body: Generation, renderer: Renderer, items: AsyncGenerator[Item, None]
) -> web.StreamResponse:
    """Sends server-sent events. Before the first token, an error still has its own HTTP status."""
    with_usage = body.stream_options.include_usage
    continuous = body.stream_options.continuous_usage_stats
    choice, output = await anext(items)
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    try:
        chunk, size = await _chunk(renderer, choice, output)
        while True:
            if continuous:
                chunk["usage"] = renderer.usage.json()
            elif with_usage:
                chunk["usage"] = None
            await _write(response, await encoded(size, partial(dict, chunk)))
            try:
                choice, output = await anext(items)
            except StopAsyncIteration:
                break
            chunk, size = await _chunk(renderer, choice, output)
        tail = _event(renderer.usage_chunk()) + DONE if with_usage else DONE
        await response.write(tail)
    except Exception as error:
        if request.transport is None or request.transport.is_closing():
            return response  # the client is gone, so the error cannot be sent
        await response.write(_event(from_exception(error, request[request_id_key]).body()))
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: list[bytes]) -> None:
    """One event."""
    if len(data) == 1:
        await response.write(b"data: " + data[0] + b"\n\n")
        return
    async for part in in_turns([b"data: ", *data, b"\n\n"]):
        await response.write(part)


async def _chunk(renderer: Renderer, choice: int, output: Output) -> tuple[Json, int]:
    """The chunk and its size. The first chunk may contain the log probabilities of a long prompt."""
    size = renderer.size_of(choice, output)
    if size <= SMALL_VALUES:
        return renderer.chunk(choice, output), size
    return await asyncio.to_thread(renderer.chunk, choice, output), size


def _event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _resumed(request: web.Request, plan: Plan) -> Plan:
    """The plan with the number of output tokens that the client has already received."""
    given = request.headers.get(RESUME_HEADER)
    if given is None:
        return plan
    if not re.fullmatch(r"[0-9]{1,9}", given) or "X-Request-Id" not in request.headers or len(plan.choices) != 1:
        raise ApiError(
            400,
            f"header {RESUME_HEADER} is the number of output tokens already received; it needs the original "
            "X-Request-Id and a request with one choice",
            param=RESUME_HEADER,
        )
    return replace(plan, resume_from=int(given))


def _with_class(request: web.Request, body: BodyT) -> BodyT:
    """The header overrides the body, so that a gateway can set the class."""
    wanted = request.headers.get(CLASS_HEADER)
    if wanted is None:
        return body
    if wanted not in SERVICE_CLASSES:
        choices = ", ".join(SERVICE_CLASSES)
        raise ApiError(400, f"header {CLASS_HEADER} must be one of {choices}, got {wanted[:40]!r}", param=CLASS_HEADER)
    return body.model_copy(update={"service_class": wanted})

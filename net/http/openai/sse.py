"""Sends a stream of server-sent events: what every streamed answer of the API shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from net.http.common.errors import ApiError, from_exception
from net.http.common.frontend import Output
from net.http.common.middleware import request_id_key
from net.http.common.pieces import SMALL_VALUES, encoded, in_turns
from net.http.openai.streams import Item

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: forward events immediately
}

Event = tuple[str, dict[str, Any]]
"""(name, data); an empty name is not sent."""


class Streamed(Protocol):
    """An answer as events."""

    ending: bytes  # sent after the last event of a whole answer
    last_size: int  # approximate number of values in `last_events`, and in `failure`

    def size_of(self, choice: int, output: Output) -> int:
        """Approximate number of values in `events` of `output`."""
        ...

    def events(self, choice: int, output: Output) -> list[Event]: ...

    def last_events(self) -> list[Event]:
        """After the end of all choices."""
        ...

    def failure(self, error: ApiError) -> Event:
        """The event of an error after the first one."""
        ...


async def send_stream(request: web.Request, answer: Streamed, items: AsyncGenerator[Item, None]) -> web.StreamResponse:
    """Before the first token, an error still has its own HTTP status."""
    choice, output = await anext(items)
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    try:
        while True:
            events, size = await _events(answer, choice, output)
            for name, data in events:
                await _write(response, name, data, size)
            try:
                choice, output = await anext(items)
            except StopAsyncIteration:
                break
        for name, data in answer.last_events():
            await _write(response, name, data, answer.last_size)
        if answer.ending:
            await response.write(answer.ending)
    except Exception as error:
        if request.transport is None or request.transport.is_closing():
            return response  # the client is gone, so the error cannot be sent
        await _write(response, *answer.failure(from_exception(error, request[request_id_key])), answer.last_size)
    await response.write_eof()
    return response


async def _events(answer: Streamed, choice: int, output: Output) -> tuple[list[Event], int]:
    """The events and their size. The first ones may contain the log probabilities of a long prompt."""
    size = answer.size_of(choice, output)
    if size <= SMALL_VALUES:
        return answer.events(choice, output), size
    return await asyncio.to_thread(answer.events, choice, output), size


async def _write(response: web.StreamResponse, name: str, data: dict[str, Any], size: int) -> None:
    """One event. `size`: approximate number of values in `data`."""
    json = await encoded(size, partial(dict, data))
    if len(json) == 1:
        await response.write(_head(name) + json[0] + b"\n\n")
        return
    async for part in in_turns([_head(name), *json, b"\n\n"]):
        await response.write(part)


def _head(name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " if name else b"data: "

"""One request of any generating route, from its body to its answer: room, turn, plan, stream or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel

from net.http.common.body import parse_body, read_raw
from net.http.common.door import Door
from net.http.common.frontend import Frontend, Output
from net.http.common.heads import session_of
from net.http.common.middleware import request_id_key
from net.http.common.pieces import answer, encoded
from net.http.openai.best_of import generated
from net.http.openai.plan import Plan
from net.http.openai.sse import Streamed, send_stream
from net.loop.turns import Turns

BodyT = TypeVar("BodyT", bound=BaseModel)
PlanT = TypeVar("PlanT")


class Answer(Streamed, Protocol):
    """An answer as events, or whole."""

    size: int  # approximate number of values in `whole`

    def collect(self, choice: int, output: Output) -> None:
        """Keep an output for `whole`."""
        ...

    def whole(self) -> dict[str, Any]: ...


class Serving:
    """What the routes of one server share."""

    def __init__(self, frontend: Frontend, door: Door) -> None:
        self.frontend = frontend
        self._answering = 0
        self._door = door
        self._turns = Turns()

    async def planned(
        self, request: web.Request, kind: type[BodyT], plan: Callable[[BodyT, int], Awaitable[PlanT]]
    ) -> tuple[BodyT, PlanT]:
        """The body and its plan. A request for which there is no room is refused before any work for it; those with
        room are worked on in the order in which their bodies arrived. plan(body, its size in bytes)."""
        self._door.leave(request.protocol)
        self._door.check()
        raw = await read_raw(request)
        self._door.check()
        self._door.arriving += 1
        try:
            await self._turns.take()
            body = await parse_body(request, raw, kind)
            return body, await plan(body, len(raw))
        finally:
            self._door.arriving -= 1

    async def answer(
        self, request: web.Request, plan: Plan, stream: bool, rendered: Callable[[str], Answer]
    ) -> web.StreamResponse:
        """rendered(request id): the answer to fill."""
        plan = replace(plan, session=session_of(request.headers) or plan.session)
        request_id = request[request_id_key]
        told = rendered(request_id)
        self._answering += 1
        try:
            # The server cancels this task when the client disconnects; `aclosing` then closes every generation.
            async with aclosing(generated(self.frontend, plan, request_id)) as items:
                if stream:
                    return await send_stream(request, told, items)
                async for choice, output in items:
                    told.collect(choice, output)
            return answer(await encoded(told.size, told.whole))
        finally:
            self._answering -= 1

    def working_on(self) -> int:
        """Number of requests that this server works on."""
        return self._answering + self._door.arriving

    async def load(self, request: web.Request) -> web.Response:
        """vLLM's GET /load: requests that this server works on."""
        return answer([orjson.dumps({"server_load": self.working_on()})])

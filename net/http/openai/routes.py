"""The two completion routes, streamed and whole."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from net.http.common.errors import ApiError
from net.http.openai.plan import Plan, plan_chat, plan_completion
from net.http.openai.render import ChatRenderer, CompletionRenderer, Renderer
from net.http.openai.schema import SERVICE_CLASSES, ChatBody, CompletionBody, Generation
from net.http.openai.serving import Serving

CLASS_HEADER = "X-Mooncake-Class"
RESUME_HEADER = "X-Resume-From"
"""Number of output tokens already received, when a client repeats a request with its X-Request-Id after the answering
node was lost."""

BodyT = TypeVar("BodyT", bound=Generation)


class OpenAI:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: web.Request) -> web.StreamResponse:
        async def plan(body: CompletionBody, size: int) -> Plan:
            return await plan_completion(self._serving.frontend, with_class(request, body), size)

        body, planned = await self._serving.planned(request, CompletionBody, plan)
        return await self._answer(request, body, planned, CompletionRenderer)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        async def plan(body: ChatBody, size: int) -> Plan:
            return await plan_chat(self._serving.frontend, with_class(request, body), size)

        body, planned = await self._serving.planned(request, ChatBody, plan)
        return await self._answer(request, body, planned, ChatRenderer)

    async def _answer(
        self, request: web.Request, body: Generation, plan: Plan, renderer: type[Renderer]
    ) -> web.StreamResponse:
        plan, created = _resumed(request, plan), int(time.time())
        rendered = partial(_rendered, renderer, self._serving, plan, body, created)
        return await self._serving.answer(request, plan, body.stream, rendered)


def _rendered(
    renderer: type[Renderer], serving: Serving, plan: Plan, body: Generation, created: int, request_id: str
) -> Renderer:
    return renderer(serving.frontend, plan, request_id, created, body.return_token_ids, body.stream_options)


def _resumed(request: web.Request, plan: Plan) -> Plan:
    """The plan with the number of output tokens that the client has already received."""
    given = request.headers.get(RESUME_HEADER)
    if given is None:
        return plan
    single = len(plan.choices) == plan.best_of == 1
    if not re.fullmatch(r"[0-9]{1,9}", given) or "X-Request-Id" not in request.headers or not single:
        raise ApiError(
            400,
            f"header {RESUME_HEADER} is the number of output tokens already received; it needs the original "
            "X-Request-Id and a request with one choice",
            param=RESUME_HEADER,
        )
    return replace(plan, resume_from=int(given))


def with_class(request: web.Request, body: BodyT) -> BodyT:
    """The header overrides the body, so that a gateway can set the class."""
    wanted = request.headers.get(CLASS_HEADER)
    if wanted is None:
        return body
    if wanted not in SERVICE_CLASSES:
        choices = ", ".join(SERVICE_CLASSES)
        raise ApiError(400, f"header {CLASS_HEADER} must be one of {choices}, got {wanted[:40]!r}", param=CLASS_HEADER)
    return body.model_copy(update={"service_class": wanted})

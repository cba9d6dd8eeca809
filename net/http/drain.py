"""POST /drain and GET /drain: a node leaves without dropping a request (engine/node/leaving.py)."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from net.http.common.body import read_body
from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend, Refused
from net.http.common.limits import is_local
from net.http.info import json_response


class DrainBody(BaseModel):
    """Times in seconds; timeout_s None: the node's --drain-timeout-ms."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float | None = Field(None, ge=0, le=86_400)
    grace_s: float = Field(1.0, ge=0, le=3_600)
    force: bool = False


class Drain:
    """Without API keys, only clients on this host may ask, and no web page; with keys, the middleware has checked the
    key."""

    def __init__(self, frontend: Frontend, keyed: bool) -> None:
        self._frontend = frontend
        self._keyed = keyed

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/drain", self.begin), web.get("/drain", self.progress)]

    async def begin(self, request: web.Request) -> web.Response:
        if not self._keyed and (not is_local(request) or "Origin" in request.headers):
            raise ApiError(
                403,
                "without an API key, only a client on the node's own host may drain it, and no web page",
                code="forbidden",
            )
        body, _ = await read_body(request, DrainBody)
        try:
            progress = self._frontend.drain(body.timeout_s, body.grace_s, body.force)
        except Refused as error:
            raise ApiError(409, str(error), param="force", code="last_of_its_role") from None
        return json_response(progress)

    async def progress(self, request: web.Request) -> web.Response:
        return json_response(self._frontend.draining())

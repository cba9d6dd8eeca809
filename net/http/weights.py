"""POST and GET /v1/update_weights: the cluster serves other weights, which a program put into the pool as tensors
(engine/update/coordinator.py)."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, field_validator

from net.http.common.body import read_body
from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend, Refused, Unavailable
from net.http.common.limits import is_local
from net.http.info import json_response

PREFIX_BYTES = 100


class UpdateWeightsBody(BaseModel):
    """`prefix`: of the names of all tensors; `version`: the client's name for these weights; `tenant`: that of the
    program that put them; timeout_s: for preparing."""

    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(min_length=1, max_length=PREFIX_BYTES)
    version: str = Field(min_length=1, max_length=100)
    tenant: str = Field("default", min_length=1, max_length=100)
    timeout_s: float = Field(600.0, gt=0, le=86_400)

    @field_validator("prefix")
    @classmethod
    def _short(cls, prefix: str) -> str:
        if len(prefix.encode()) > PREFIX_BYTES:
            raise ValueError(f"has more than {PREFIX_BYTES} bytes")
        return prefix


class Weights:
    """Without API keys, only clients on this host may replace weights, and no web page; with keys, the middleware has
    checked the key."""

    def __init__(self, frontend: Frontend, keyed: bool) -> None:
        self._frontend = frontend
        self._keyed = keyed

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/update_weights", self.update), web.get("/v1/update_weights", self.state)]

    async def update(self, request: web.Request) -> web.Response:
        if not self._keyed and (not is_local(request) or "Origin" in request.headers):
            raise ApiError(
                403,
                "without an API key, only a client on the node's own host may replace the weights, and no web page",
                code="forbidden",
            )
        body, _ = await read_body(request, UpdateWeightsBody)
        try:
            done = await self._frontend.update_weights(body.prefix, body.version, body.tenant, body.timeout_s)
        except ValueError as error:
            raise ApiError(400, str(error), param="prefix", code="unfit_tensors") from None
        except Refused as error:
            raise ApiError(409, str(error), code="refused") from None
        except Unavailable as error:
            raise ApiError(503, str(error), code="not_prepared", headers={"Retry-After": "1"}) from None
        return json_response(done)

    async def state(self, request: web.Request) -> web.Response:
        return json_response(self._frontend.weights())

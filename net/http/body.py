"""Reading a JSON body: size, type, UTF-8, JSON, fields; each failure with its own status and words."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from net.http.errors import ApiError, bad_request, from_validation
from net.http.limits import read_timeout_key

BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """The valid body. Raises ApiError 400, 408 or 415, HTTPRequestEntityTooLarge."""
    kind_sent = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if kind_sent != "application/json" and not kind_sent.endswith("+json"):
        raise ApiError(415, f"send the body as 'Content-Type: application/json', not {kind_sent[:80]!r}")
    seconds = request.app[read_timeout_key]
    try:
        async with asyncio.timeout(seconds):
            raw = await request.read()
    except TimeoutError:
        message = f"the request body did not come within {seconds:g} s (--read-timeout-ms)"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise from_validation(error) from error

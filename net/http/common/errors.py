"""Errors in OpenAI's format: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from net.http.common.frontend import Overloaded, Unavailable

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Longer error messages are cut, so that a wrong 8 MiB body is not sent back."""

MAX_ERRORS = 1000
"""pydantic describes all errors of a body or none, and holds the interpreter lock for it: for 300,000 more than 5 s."""

BASE = "/v1"
MAX_GUESSED_CHARS = 100
SIMILAR = 0.75
"""Share of equal characters from which an unknown path is taken for a misspelt route."""

_types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class ApiError(Exception):
    """A refusal with its HTTP status; raised anywhere below a handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _types.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": told}  # Anthropic's clients read the outer type

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=orjson.dumps(self.body()),
            content_type="application/json",
            headers=self.headers,
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def from_validation(error: ValidationError) -> ApiError:
    """pydantic's first error, in one line that names the field, unless there are more than MAX_ERRORS."""
    if (count := error.error_count()) > MAX_ERRORS:
        return bad_request(f"{count} values in the body are wrong: too many to name the first one")
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {field}", field, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: {field}", field, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{field}: {message}", str(first["loc"][0])) if field else naming(message)


def naming(message: str) -> ApiError:
    """400 for a message that begins with the field's name: 'top_p must be in (0, 1], got 2'."""
    named = re.match(r"([a-z_]+)(?=: | must be | is not supported| needs )", message)
    return bad_request(message, named[1] if named else None)


def no_route(path: str, routes: Collection[str]) -> ApiError:
    """404 with a guess at the intended one of `routes`."""
    meant = _meant(path[-MAX_GUESSED_CHARS:], routes)
    if meant is None:
        hint = "GET /v1/models tests the base URL, GET /openapi.json lists all routes"
    elif meant.startswith(BASE):
        hint = f"did you mean {meant}? A client's base URL is http://HOST:PORT{BASE}"
    else:
        hint = f"did you mean {meant}?"
    return ApiError(404, f"no such route; {hint}", code="unknown_url")


def _meant(path: str, routes: Collection[str]) -> str | None:
    """The route with the longest end in common with `path` apart from case, slashes and BASE, else a similar one."""
    given = "/" + "/".join(part for part in path.lower().split("/") if part)
    ends = {route.removeprefix(BASE): route for route in routes if route != "/"}
    whole = [end for end in ends if given.endswith(end)]
    close = [max(whole, key=len)] if whole else get_close_matches(given.removeprefix(BASE), ends, 1, SIMILAR)
    return ends[close[0]] if close else None


def from_exception(error: Exception, request_id: str) -> ApiError:
    """The ApiError that reports `error` to the client. Unexpected errors are logged and not disclosed."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return from_validation(error)
        case Overloaded():
            return ApiError(429, str(error), code="overloaded", headers=_retry_after(error.retry_after_s))
        case Unavailable():
            return ApiError(503, str(error), code="unavailable", headers=_retry_after(error.retry_after_s))
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is too large (--max-body-bytes)", code="request_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"method {error.method} is not allowed here; use {allowed}"
            return ApiError(405, message, headers={"Allow": allowed})
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case web.RequestPayloadError():
            return bad_request("the request body could not be decoded")
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"internal error; look for request id {request_id} in the server's log")

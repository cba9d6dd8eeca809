"""Reads a JSON body: checks size, type, UTF-8, JSON and fields; each failure has its own status and message."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from net.http.common.bounds import MAX_DEPTH, MAX_VALUES, containers_in, deeper_than, values_in
from net.http.common.errors import ApiError, bad_request, from_validation
from net.http.common.limits import read_timeout_key
from net.http.common.unknown import ignored_key, ignores_key

BodyT = TypeVar("BodyT", bound=BaseModel)

LONG_BODY_BYTES = 16 << 10
"""Longer bodies are parsed in a thread."""

COMPRESSED = ("gzip", "deflate")
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_body(request: web.Request, kind: type[BodyT]) -> tuple[BodyT, int]:
    """The valid body and its size in bytes. Raises ApiError 400, 408, 413 or 415, HTTPRequestEntityTooLarge."""
    raw = await read_raw(request)
    return await parse_body(request, raw, kind), len(raw)


async def read_raw(request: web.Request) -> bytes:
    """The body, decompressed. Raises ApiError 400, 408 or 415, HTTPRequestEntityTooLarge."""
    kind_sent = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind_sent == "application/x-www-form-urlencoded":  # what curl -d sends
        raise ApiError(
            415, "send the body as 'Content-Type: application/json': curl -d alone, without this header, sends a form"
        )
    if not kind_sent:  # a page of another site can send it without asking first
        raise ApiError(415, "send the body as 'Content-Type: application/json': this request names no type")
    if kind_sent != "application/json" and not kind_sent.endswith("+json"):
        raise ApiError(415, f"send the body as 'Content-Type: application/json', not {kind_sent[:80]!r}")
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", *COMPRESSED):
        raise ApiError(415, f"send the body as it is, or compressed with gzip or deflate, not {coding[:80]!r}")
    seconds = request.app[read_timeout_key]
    try:
        async with asyncio.timeout(seconds):
            raw = await request.read()
    except TimeoutError:
        message = f"the request body did not arrive within {seconds:g} s (--read-timeout-ms)"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    return raw if coding == "identity" else await asyncio.to_thread(decompressed, raw, request.client_max_size)


def decompressed(raw: bytes, most: int) -> bytes:
    """The body that was compressed. The HTTP server does not do this, because a few bytes may become thousands of times
    as many: these take at most the memory of `most`. Raises ApiError 400, HTTPRequestEntityTooLarge."""
    stream = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        found = stream.decompress(raw, most + 1)
    except zlib.error as error:
        raise bad_request(f"the request body could not be decompressed: {error}") from None
    if len(found) > most:
        raise web.HTTPRequestEntityTooLarge(most, len(found))
    if not stream.eof or stream.unused_data:
        raise bad_request("the request body could not be decompressed: it is not one whole stream")
    return found


async def parse_body(request: web.Request, raw: bytes, kind: type[BodyT]) -> BodyT:
    """The valid body. Raises ApiError 400 or 413."""
    _check_values(raw)
    ignored: list[str] | None = [] if request.app[ignores_key] else None
    if len(raw) <= LONG_BODY_BYTES:
        body = parsed(raw, kind, ignored)
    else:
        body = await asyncio.to_thread(parsed, raw, kind, ignored)
    if ignored is not None:
        request[ignored_key] = ignored
    return body


def _check_values(raw: bytes) -> None:
    """Bounds the number of objects: the JSON library holds the interpreter lock while it builds them."""
    values = values_in(raw)
    if values > MAX_VALUES:
        message = f"the request body contains about {values} values, more than the limit of {MAX_VALUES}"
        raise ApiError(413, message, code="request_too_large")


def _check_depth(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if deeper_than(MAX_DEPTH - 1, value):
            raise bad_request(f"{name[:80]}: nested more than {MAX_DEPTH} levels deep in the body", name[:80])


def parsed(raw: bytes, kind: type[BodyT], ignored: list[str] | None = None) -> BodyT:
    """The valid body; `ignored` gets the names of unknown fields; None: they are refused. Raises ApiError 400."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    if containers_in(raw) > MAX_DEPTH:
        _check_depth(found)
    try:
        return kind.model_validate(found, context=ignored)
    except ValidationError as error:
        refused = from_validation(error)
    try:
        raise refused
    finally:  # it travels to the event loop with this frame, which must keep neither the values nor the refusal itself
        del found, refused

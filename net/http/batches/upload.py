"""Receives an uploaded file: the parts of its multipart body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from net.http.batches.line import MAX_FILE_BYTES
from net.http.batches.schema import number_in
from net.http.common.errors import ApiError, bad_request
from net.http.common.limits import read_timeout_key

PURPOSE = "batch"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", ANCHOR, SECONDS)
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2_592_000
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client says of its file."""

    filename: str
    life_s: int | None  # None: the file stays


async def receive(request: web.Request, path: Path) -> Upload:
    """Write the file to `path`. Raises OSError; ApiError 400, 408, 413 or 415; then a part of it may be there."""
    if not request.content_type.startswith("multipart/form-data"):
        raise ApiError(415, "send the file as multipart/form-data with the fields file and purpose")
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "send the file as it is, not compressed")
    try:
        async with asyncio.timeout(10 * request.app[read_timeout_key]):
            filename, size, fields = await _parts(request, path)
    except TimeoutError:
        raise ApiError(408, "the file did not arrive in time (--read-timeout-ms)", code="body_timeout") from None
    except (ValueError, RuntimeError) as error:
        raise bad_request(f"the body is not valid multipart/form-data: {error}") from None
    except BadHttpMessage as error:
        raise bad_request(f"the body has a part with too long or too many headers: {error.message[:200]}") from None
    if not filename:
        raise bad_request("the field file is missing", "file")
    try:
        filename.encode()
    except UnicodeEncodeError:
        raise bad_request("the name of the file is not UTF-8", "file") from None
    if fields.get("purpose") != PURPOSE:
        raise bad_request("purpose must be 'batch': this server keeps files for batches only", "purpose")
    if not size:
        raise bad_request("the file is empty", "file")
    return Upload(filename, _life_s(fields))


async def _parts(request: web.Request, path: Path) -> tuple[str, int, dict[str, str]]:
    """(name of the file, its bytes, values of FIELDS)"""
    filename, size, fields = "", 0, dict[str, str]()
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            raise bad_request("a part of the body has parts of its own")
        if part.name == "file":
            filename = (part.filename or "input.jsonl")[:255]
            with path.open("wb") as out:
                size = await _copy(part, out.write)
        elif part.name in FIELDS:
            fields[part.name] = (await part.read_chunk(4096)).decode(errors="replace")
    return filename, size, fields


async def _copy(part: BodyPartReader, write: Callable[[bytes], Any]) -> int:
    """The number of bytes. Raises ApiError 413 beyond the limit."""
    size = 0
    while chunk := await part.read_chunk(CHUNK_BYTES):
        size += len(chunk)
        if size > MAX_FILE_BYTES:
            raise ApiError(413, f"a file may have {MAX_FILE_BYTES >> 20} MB", code="file_too_large")
        await asyncio.to_thread(write, bytes(chunk))
    return size


def _life_s(fields: Mapping[str, str]) -> int | None:
    if ANCHOR not in fields and SECONDS not in fields:
        return None
    if fields.get(ANCHOR, "created_at") != "created_at":
        raise bad_request("expires_after[anchor] must be created_at", "expires_after")
    life_s = number_in(fields.get(SECONDS, ""), LEAST_LIFE_S, MOST_LIFE_S)
    if life_s is None:
        raise bad_request(
            f"expires_after[seconds] must be a number from {LEAST_LIFE_S} to {MOST_LIFE_S}", "expires_after"
        )
    return life_s

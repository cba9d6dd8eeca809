"""The routes of files and batches, in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from aiohttp import BodyPartReader, web

from net.http.batches.files import new_id
from net.http.batches.line import MAX_FILE_BYTES
from net.http.batches.record import Batch
from net.http.batches.runner import Batches
from net.http.batches.schema import BatchBody
from net.http.common.body import read_body
from net.http.common.errors import ApiError, bad_request
from net.http.common.limits import read_timeout_key
from net.http.common.pieces import answer

PURPOSE = "batch"
PAGE, MOST_PAGE = 20, 100
MOST_FILES = 10_000
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2_592_000
CHUNK_BYTES = 1 << 18


class BatchRoutes:
    """`batches`: None without --batch-path."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self.upload),
            web.get("/v1/files", self.files),
            web.get("/v1/files/{file_id}", self.file),
            web.delete("/v1/files/{file_id}", self.delete),
            web.get("/v1/files/{file_id}/content", self.content),
            web.post("/v1/batches", self.create),
            web.get("/v1/batches", self.batches),
            web.get("/v1/batches/{batch_id}", self.batch),
            web.post("/v1/batches/{batch_id}/cancel", self.cancel),
        ]

    async def start(self, app: web.Application) -> None:
        if self._batches is not None:
            self._batches.start()

    async def close(self, app: web.Application) -> None:
        if self._batches is not None:
            await self._batches.close()

    def _kept(self) -> Batches:
        if self._batches is None:
            raise ApiError(404, "this node keeps no files; start it with --batch-path DIR", code="no_batches")
        return self._batches

    # --- files

    async def upload(self, request: web.Request) -> web.Response:
        files = self._kept().files
        if not request.content_type.startswith("multipart/form-data"):
            raise ApiError(415, "send the file as multipart/form-data with the fields file and purpose")
        file_id, fields, filename = new_id("file"), dict[str, str](), ""
        path = files.path(file_id)
        try:
            async with asyncio.timeout(10 * request.app[read_timeout_key]):
                async for part in await request.multipart():
                    if not isinstance(part, BodyPartReader):
                        raise bad_request("a part of the body has parts of its own")
                    if part.name == "file":
                        filename = (part.filename or "input.jsonl")[:255]
                        with path.open("wb") as out:
                            await _copy(part, out.write)
                    elif part.name is not None:
                        fields[part.name] = (await part.read_chunk(4096)).decode(errors="replace")
            if not filename:
                raise bad_request("the field file is missing", "file")
            if fields.get("purpose") != PURPOSE:
                raise bad_request("purpose must be 'batch': this server keeps files for batches only", "purpose")
            if not path.stat().st_size:
                raise bad_request("the file is empty", "file")
            life_s, now = _life_s(fields), int(time.time())
            return _json(await asyncio.to_thread(files.add, file_id, filename, PURPOSE, now, life_s))
        except TimeoutError:
            raise ApiError(408, "the file did not arrive in time (--read-timeout-ms)", code="body_timeout") from None
        except ValueError as error:
            raise bad_request(f"the body is not valid multipart/form-data: {error}") from None
        except OSError as error:
            raise _not_kept("file", error) from None
        finally:
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    async def files(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        found = await asyncio.to_thread(self._kept().files.all, int(time.time()))
        found = [one for one in found if purpose in (None, one["purpose"])]
        if _order(request) == "asc":
            found.reverse()
        return _json(_page(request, found, MOST_FILES, MOST_FILES))

    async def file(self, request: web.Request) -> web.Response:
        return _json(self._file(request))

    async def delete(self, request: web.Request) -> web.Response:
        found = self._file(request)
        self._kept().files.remove(found["id"])
        return _json({"id": found["id"], "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        found = self._file(request)
        path = self._kept().files.path(found["id"])
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    def _file(self, request: web.Request) -> dict[str, Any]:
        file_id = request.match_info["file_id"]
        try:
            return self._kept().files.get(file_id, int(time.time()))
        except KeyError:
            raise ApiError(404, f"no such file: {file_id[:80]!r}", param="file_id", code="not_found") from None

    # --- batches

    async def create(self, request: web.Request) -> web.Response:
        batches = self._kept()
        body, _ = await read_body(request, BatchBody)
        now = int(time.time())
        try:
            given = batches.files.get(body.input_file_id, now)
        except KeyError:
            raise _no_file(body.input_file_id) from None
        if given["purpose"] != PURPOSE:
            raise bad_request("input_file_id: not a file with purpose 'batch'", "input_file_id")
        life = None if body.output_expires_after is None else body.output_expires_after.seconds
        batch = Batch(
            new_id("batch"), body.endpoint, body.input_file_id, body.completion_window, now, body.metadata, life
        )
        try:
            await batches.create(batch)
        except FileNotFoundError:
            raise _no_file(body.input_file_id) from None
        except OSError as error:
            raise _not_kept("batch", error) from None
        return _json(batch.shown())

    async def batches(self, request: web.Request) -> web.Response:
        return _json(_page(request, [one.shown() for one in self._kept().all()], PAGE, MOST_PAGE))

    async def batch(self, request: web.Request) -> web.Response:
        return _json(self._batch(request).shown())

    async def cancel(self, request: web.Request) -> web.Response:
        batch = self._batch(request)
        if not batch.open:
            raise ApiError(409, f"the batch is {batch.status} already", code="batch_over")
        try:
            await self._kept().cancel(batch)
        except OSError as error:
            raise _not_kept("batch", error) from None
        return _json(batch.shown())

    def _batch(self, request: web.Request) -> Batch:
        batch_id = request.match_info["batch_id"]
        try:
            return self._kept().get(batch_id)
        except KeyError:
            raise ApiError(404, f"no such batch: {batch_id[:80]!r}", param="batch_id", code="not_found") from None


def _no_file(file_id: str) -> ApiError:
    return bad_request(f"input_file_id: no such file: {file_id[:80]!r}", "input_file_id", "not_found")


def _not_kept(kind: str, error: OSError) -> ApiError:
    return ApiError(507, f"the {kind} cannot be kept: {error.strerror}", code="no_space")


def _json(value: dict[str, Any]) -> web.Response:
    return answer([orjson.dumps(value)])


async def _copy(part: BodyPartReader, write: Callable[[bytes], Any]) -> None:
    """Raises ApiError 413 beyond the limit."""
    size = 0
    while chunk := await part.read_chunk(CHUNK_BYTES):
        size += len(chunk)
        if size > MAX_FILE_BYTES:
            raise ApiError(413, f"a file may have {MAX_FILE_BYTES >> 20} MB", code="file_too_large")
        await asyncio.to_thread(write, bytes(chunk))


def _life_s(fields: dict[str, str]) -> int | None:
    """The lifetime in `expires_after`; None: the file stays."""
    given = fields.get("expires_after[seconds]")
    if given is None:
        return None
    if not given.isdecimal() or not LEAST_LIFE_S <= int(given) <= MOST_LIFE_S:
        raise bad_request(
            f"expires_after[seconds] must be a number from {LEAST_LIFE_S} to {MOST_LIFE_S}", "expires_after"
        )
    return int(given)


def _order(request: web.Request) -> str:
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc", "order")
    return order


def _page(request: web.Request, found: Sequence[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """The part of a list behind `after`, at most `limit` entries."""
    limit = request.query.get("limit", str(default))
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise bad_request(f"limit must be a number from 1 to {most}", "limit")
    after = request.query.get("after")
    places = [place for place, one in enumerate(found, 1) if one["id"] == after]
    if after is not None and not places:
        raise bad_request(f"after: no such entry: {after[:80]!r}", "after")
    rest = found[places[0] :] if places else found
    page = rest[: int(limit)]
    return {
        "object": "list",
        "data": list(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(rest),
    }

"""The routes of files and batches, in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Any

import orjson
from aiohttp import web

from net.http.batches.files import new_id
from net.http.batches.record import Batch
from net.http.batches.runner import Batches
from net.http.batches.schema import BatchBody, number_in
from net.http.batches.upload import PURPOSE, receive
from net.http.common.body import read_body
from net.http.common.errors import ApiError, bad_request
from net.http.common.limits import from_foreign_page
from net.http.common.pieces import answer

PAGE, MOST_PAGE = 20, 100
MOST_FILES = 10_000


class BatchRoutes:
    """`batches`: None without --batch-path. Without API keys, no web page begins or ends anything, except those of
    `origins`; with keys, the middleware has checked the key."""

    def __init__(self, batches: Batches | None, keyed: bool, origins: Collection[str]) -> None:
        self._batches = batches
        self._keyed, self._origins = keyed, origins

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

    def _changed_by(self, request: web.Request) -> Batches:
        """The batches, if the client may change them: browsers send a form to any server without asking it first."""
        if not self._keyed and from_foreign_page(request, self._origins):
            message = "without an API key, no web page may upload files or begin and cancel batches (--allowed-origins)"
            raise ApiError(403, message, code="forbidden")
        return self._kept()

    # --- files

    async def upload(self, request: web.Request) -> web.Response:
        files = self._changed_by(request).files
        file_id = new_id("file")
        path, publishing = files.path(file_id), False
        try:
            given = await receive(request, path)
            publishing = True  # also if the client hangs up
            shown = await asyncio.to_thread(files.add, file_id, given.filename, PURPOSE, int(time.time()), given.life_s)
            return _json(shown)
        except OSError as error:
            raise _not_kept("file", error) from None
        finally:
            if not publishing:
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
        batches = self._changed_by(request)
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
        batches, batch = self._changed_by(request), self._batch(request)
        if not batch.open:
            raise ApiError(409, f"the batch is {batch.status} already", code="batch_over")
        try:
            await batches.cancel(batch)
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


def _order(request: web.Request) -> str:
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc", "order")
    return order


def _page(request: web.Request, found: Sequence[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """The part of a list behind `after`, at most `limit` entries."""
    limit = number_in(request.query.get("limit", str(default)), 1, most)
    if limit is None:
        raise bad_request(f"limit must be a number from 1 to {most}", "limit")
    after = request.query.get("after")
    places = [place for place, one in enumerate(found, 1) if one["id"] == after]
    if after is not None and not places:
        raise bad_request(f"after: no such entry: {after[:80]!r}", "after")
    rest = found[places[0] :] if places else found
    page = rest[:limit]
    return {
        "object": "list",
        "data": list(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(rest),
    }

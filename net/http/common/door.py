"""Refuses requests on their connection, before the HTTP server reads them, while there is no room for more.

The HTTP server reads all requests of a burst before the first handler runs, and a refusal by a handler takes several
times as long. The door knows only plain requests: a POST of a generating route with its whole head, on a connection
that has sent nothing else. The HTTP server reads everything else, and its handlers refuse it if there is no room.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

import orjson
from aiohttp import web
from multidict import CIMultiDict

from net.http.common.errors import from_exception
from net.http.common.frontend import Overloaded, Unavailable
from net.http.common.heads import request_id_of

door_key: web.AppKey[Door] = web.AppKey("door")

MAX_HEAD_BYTES = 4096
_first_line = re.compile(rb"POST (/[A-Za-z0-9_/]+) HTTP/1\.1")
_header = re.compile(rb"([A-Za-z0-9-]+): *([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_not_plain = ("Transfer-Encoding", "Expect", "Upgrade", "Origin")
"""Headers of requests whose answer depends on more than the room: chunks, protocols, pages of a browser."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The head of a plain request."""

    path: str
    headers: CIMultiDict[str]
    unread: int  # bytes of the body that have not arrived

    @property
    def closes(self) -> bool:
        """Whether the client wants the connection closed after the answer."""
        return self.headers.get("Connection", "").lower() == "close"


def plain(data: bytes) -> Plain | None:
    """The head of `data`, which is a request with a body of a known length or its begin; None for everything else."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    first, *lines = data[:end].split(b"\r\n")
    named = _first_line.fullmatch(first)
    found = [_header.fullmatch(line) for line in lines]
    if named is None:
        return None
    headers: CIMultiDict[str] = CIMultiDict()
    for one in found:
        if one is None or (name := one[1].decode()) in headers:
            return None
        headers[name] = (one[2] or b"").decode()
    length = headers.get("Content-Length", "")
    arrived = len(data) - end - 4
    if not re.fullmatch("[0-9]{1,9}", length) or int(length) < arrived:
        return None
    if any(name in headers for name in _not_plain) or headers.get("Connection", "keep-alive").lower() not in (
        "keep-alive",
        "close",
    ):
        return None
    return Plain(named[1].decode(), headers, int(length) - arrived)


class Door:
    """`check_room(n)` raises Overloaded if there is no room after n others, Unavailable on a node without a model.
    `paths`: the generating routes. `known(headers)`: whether the client may ask for an answer."""

    def __init__(
        self, check_room: Callable[[int], None], paths: Collection[str], known: Callable[[Mapping[str, str]], bool]
    ) -> None:
        self.arriving = 0  # requests in handlers that have not entered yet
        self._check_room, self._paths, self._known = check_room, frozenset(paths), known
        self._inside: set[object] = set()  # connections that were let in, and whose handlers have not begun

    def check(self) -> None:
        """Raises what `check_room` raises for one more. For handlers; they begin in the order of `refusal`."""
        self._check_room(self.arriving)

    def refusal(self, connection: object, data: bytes) -> tuple[Plain, bytes] | None:
        """The head of a request and its answer, for the first bytes of a connection; None if the HTTP server must read
        them."""
        head = plain(data) if data.startswith(b"POST ") else None
        if head is None or head.path not in self._paths or not self._known(head.headers):
            return None
        try:
            self._check_room(self.arriving + len(self._inside))
        except (Overloaded, Unavailable) as error:
            return head, answer(error, head)
        self._inside.add(connection)
        return None

    def leave(self, connection: object) -> None:
        """The request's handler has begun, or the connection ended. May be called again."""
        self._inside.discard(connection)


def answer(error: Overloaded | Unavailable, head: Plain) -> bytes:
    """The same as a handler answers."""
    request_id = request_id_of(head.headers)
    refused = from_exception(error, request_id)
    body = orjson.dumps(refused.body())
    headers = refused.headers | {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Date": formatdate(usegmt=True),
        "Server": "mooncake",
        "X-Request-Id": request_id,
        "Connection": "close" if head.closes else "keep-alive",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = HTTPStatus(refused.status)
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body

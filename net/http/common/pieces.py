"""Sends large JSON answers without blocking the event loop or the interpreter lock for long. A thread builds and
encodes them piece by piece, because the JSON library holds the lock during each call, and they are sent in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import orjson
from aiohttp import web

PIECE_VALUES = 4096
"""Approximate number of values per encoding call: 0.2 ms."""

SENT_BYTES = 256 << 10
"""Approximate part of an answer that is sent in one turn of the event loop: 0.1 ms."""

SMALL_VALUES = 500
"""Answers with at most this many values are encoded on the event loop: about 2 ms."""

VALUE_CHARS = 1000
"""This many characters of text cost as much as one value."""

OPTIONS = orjson.OPT_NON_STR_KEYS
SCALARS = frozenset({int, float, bool, str, type(None)})


class Rows:
    """A long list in an answer. Its elements are made during encoding, a few at a time, and only once even if the list
    appears in several places."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    @cached_property
    def parts(self) -> list[bytes]:
        """The list as JSON."""
        return list(_merged(_listed(self._make())))


class Prepared:
    """A value in an answer, encoded when this object is made, so that it costs the answers little that contain it."""

    def __init__(self, value: Any) -> None:
        self.parts = parts(value)
        self.size = sum(map(len, self.parts)) // VALUE_CHARS  # in values


async def encoded(size: int, make: Callable[[], Any]) -> list[bytes]:
    """make() as JSON, in parts of about SENT_BYTES; `size`: its approximate number of values."""
    return [_dumps(make())] if size <= SMALL_VALUES else await asyncio.to_thread(lambda: parts(make()))


def parts(value: Any) -> list[bytes]:
    """JSON of `value`, which may contain Rows and Prepared, in parts of about SENT_BYTES. Keys of long objects must be
    strings."""
    return list(_merged(_written(value)))


def answer(data: list[bytes]) -> web.Response:
    """The response with this JSON."""
    if len(data) == 1:
        return web.Response(body=data[0], content_type="application/json")
    length = {"Content-Length": str(sum(map(len, data)))}
    return web.Response(body=in_turns(data), headers=length, content_type="application/json")


async def in_turns(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yields one part per turn of the event loop: a fast client would otherwise get all parts in one turn."""
    for part in data:
        yield part
        await asyncio.sleep(0)


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, default=_in_place, option=OPTIONS)


def _in_place(value: Any) -> orjson.Fragment:
    if not isinstance(value, Rows | Prepared):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return orjson.Fragment(b"".join(value.parts))


def _written(value: Any) -> Iterator[bytes]:
    if isinstance(value, Rows | Prepared):
        yield from value.parts
    elif not isinstance(value, dict | list) or _size(value) <= PIECE_VALUES:
        yield _dumps(value)
    elif isinstance(value, list):
        yield from _listed(value)
    else:
        before = b"{"
        for key, one in value.items():
            yield before + orjson.dumps(str(key)) + b":"
            yield from _written(one)
            before = b","
        yield b"}"


def _listed(elements: Iterable[Any]) -> Iterator[bytes]:
    """JSON of a list; its small elements are encoded together."""
    if isinstance(elements, list) and set(map(type, elements)) <= SCALARS:
        groups: Iterable[list[Any]] = (elements[i : i + PIECE_VALUES] for i in range(0, len(elements), PIECE_VALUES))
    else:
        groups = _grouped(elements)
    before = b"["
    for group in groups:
        if len(group) == 1:
            yield before
            yield from _written(group[0])
        else:
            yield before + _dumps(group)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _grouped(elements: Iterable[Any]) -> Iterator[list[Any]]:
    """Groups neighbours up to PIECE_VALUES values together; a larger element is a group of one."""
    group: list[Any] = []
    left = PIECE_VALUES
    for element in elements:
        size = _size(element)
        if group and size > left:
            yield group
            group, left = [], PIECE_VALUES
        group.append(element)
        left -= size
    if group:
        yield group


def _size(value: Any) -> int:
    """Approximate number of values; the count stops above PIECE_VALUES."""
    if isinstance(value, str):
        return 1 + len(value) // VALUE_CHARS
    if isinstance(value, Rows | Prepared):
        return PIECE_VALUES + 1
    if not isinstance(value, dict | list):
        return 1
    size = 1 + len(value)
    for one in value.values() if isinstance(value, dict) else value:
        if size > PIECE_VALUES:
            break
        size += _size(one) - 1
    return size


def _merged(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of about SENT_BYTES; longer pieces stay whole."""
    some: list[bytes] = []
    size = 0
    for piece in pieces:
        if some and size + len(piece) > SENT_BYTES:
            yield b"".join(some)
            some, size = [], 0
        some.append(piece)
        size += len(piece)
    if some:
        yield some[0] if len(some) == 1 else b"".join(some)

"""Large answers as JSON without holding the interpreter lock for long: made in a thread, and encoded a piece at a time,
for the JSON library lets nobody else run until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

PIECE = 256
"""Elements of a list that are encoded in one go."""

SMALL = 500
"""Values of an answer that is made at once, on the event loop: some 2 ms."""

OPTIONS = orjson.OPT_NON_STR_KEYS


async def encoded(size: int, make: Callable[[], Any]) -> bytes:
    """make() as JSON; `size`: about how many values it has."""
    if size <= SMALL:
        return orjson.dumps(make(), option=OPTIONS)
    return await asyncio.to_thread(lambda: orjson.dumps(packed(make()), option=OPTIONS))


def packed(value: Any) -> Any:
    """The same JSON, with long lists encoded already."""
    if isinstance(value, dict):
        return {key: packed(one) for key, one in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PIECE:
        return [packed(one) for one in value]
    starts = range(0, len(value), PIECE)
    parts = [orjson.dumps([packed(one) for one in value[i : i + PIECE]], option=OPTIONS)[1:-1] for i in starts]
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")

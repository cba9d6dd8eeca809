"""Sessions: several values that are read or written in ranges, layer by layer, with one entry each.

A value moves as a whole between the pool and memory of its session, where its checksum is compared; ranges are copied
from and to that memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from connect.common.raw_memory import Pieces
from connect.store import codes

Fetch = Callable[[list[str]], dict[str, bytearray]]


class ReadSessions:
    """`fetch` gets the values that are there. Any thread may call."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._open: dict[str, bytearray | None] = {}  # None: not fetched yet
        self._lock = threading.Lock()

    def start(self, keys: Sequence[str], there: Sequence[bool]) -> list[int]:
        """OK or MISSING for each. A second start keeps what the session has."""
        with self._lock:
            for key, here in zip(keys, there, strict=True):
                if here:
                    self._open.setdefault(key, None)
        return [codes.OK if here else codes.MISSING for here in there]

    def read(
        self, keys: Sequence[str], targets: Sequence[Pieces | None], offsets: Sequence[Sequence[int]]
    ) -> list[int]:
        """Copy ranges of each value; per key the bytes, or a code."""
        with self._lock:
            self._fill([key for key in dict.fromkeys(keys) if self._open.get(key, b"") is None])
            return [self._one(*row) for row in zip(keys, targets, offsets, strict=True)]

    def _fill(self, keys: list[str]) -> None:
        for key, value in self._fetch(keys).items() if keys else ():
            self._open[key] = value

    def _one(self, key: str, target: Pieces | None, offsets: Sequence[int]) -> int:
        if key not in self._open:
            return codes.INVALID
        value = self._open[key]
        if value is None:  # evicted since the start
            return codes.MISSING
        if target is None or not _fits(target, offsets, len(value)):
            return codes.INVALID
        source = Pieces.of(value)
        for (address, nbytes), offset in zip(target.pieces, offsets, strict=True):
            source.copy_to(address, offset, nbytes)
        return target.nbytes

    def end(self, keys: Sequence[str]) -> int:
        """Forget them."""
        with self._lock:
            for key in keys:
                self._open.pop(key, None)
        return codes.OK


class WriteSessions:
    """Values that are complete when their session ends. Any thread may call."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[bytearray, object]] = {}
        self._lock = threading.Lock()

    def start(self, keys: Sequence[str], sizes: Sequence[int], there: Sequence[bool], config: object) -> list[int]:
        """OK, EXISTS for a name in the pool, INVALID for one in a session and for an empty name or size. `config` comes
        back from `take`."""
        with self._lock:
            return [self._start(*row, config) for row in zip(keys, sizes, there, strict=True)]

    def _start(self, key: str, size: int, there: bool, config: object) -> int:
        if key in self._open or not key or size <= 0:
            return codes.INVALID
        if there:
            return codes.EXISTS
        self._open[key] = bytearray(size), config
        return codes.OK

    def write(
        self, keys: Sequence[str], sources: Sequence[Pieces | None], offsets: Sequence[Sequence[int]]
    ) -> list[int]:
        """Copy ranges into each value; per key the bytes, or a code."""
        with self._lock:
            return [self._one(*row) for row in zip(keys, sources, offsets, strict=True)]

    def _one(self, key: str, source: Pieces | None, offsets: Sequence[int]) -> int:
        if key not in self._open:
            return codes.INVALID
        value = self._open[key][0]
        if source is None or not _fits(source, offsets, len(value)):
            return codes.INVALID
        into = Pieces.of(value)
        for (address, nbytes), offset in zip(source.pieces, offsets, strict=True):
            into.copy_from(address, offset, nbytes)
        return source.nbytes

    def take(self, keys: Sequence[str]) -> dict[str, tuple[bytearray, object]]:
        """End the sessions of those of `keys` that have one; returns values and configs."""
        with self._lock:
            return {key: self._open.pop(key) for key in dict.fromkeys(keys) if key in self._open}


def _fits(pieces: Pieces, offsets: Sequence[int], nbytes: int) -> bool:
    if len(pieces.pieces) != len(offsets):
        return False
    return all(at >= 0 and at + length <= nbytes for at, (_, length) in zip(offsets, pieces.pieces, strict=True))

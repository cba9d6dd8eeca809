"""Spans: which bytes a transfer moves. Pure.

A submission is a list of (local offset, remote offset, length). Neighbours are merged, each side's bytes then form one
stream in the order of the list, and a Cursor hands that stream out in pieces of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct, unpack

from net.errors import TransferError

Span = tuple[int, int, int]
"""(local offset, remote offset, length), bytes."""

Run = tuple[int, int]
"""(offset, length), bytes."""

_RUN = Struct("<2Q")


def merged(spans: Iterable[Span], name: str, nbytes: int) -> tuple[list[Span], int]:
    """The spans with neighbours joined where both sides continue, and their total length. Raises TransferError
    unless every one lies inside the local region `name` of `nbytes`."""
    out: list[Span] = []
    first_local = first_remote = length_so_far = total = 0
    for local, remote, length in spans:
        if local < 0 or remote < 0 or length < 0 or local + length > nbytes:
            raise TransferError(f"span ({local}, {remote}, {length}) is outside region {name!r} of {nbytes} bytes")
        total += length
        if local == first_local + length_so_far and remote == first_remote + length_so_far:
            length_so_far += length
            continue
        if length_so_far:
            out.append((first_local, first_remote, length_so_far))
        first_local, first_remote, length_so_far = local, remote, length
    if length_so_far:
        out.append((first_local, first_remote, length_so_far))
    return out, total


def runs(pairs: Iterable[Run]) -> list[Run]:
    """One side of the spans, neighbours joined."""
    out: list[Run] = []
    start = end = 0
    for offset, length in pairs:
        if offset == end:
            end += length
            continue
        if end > start:
            out.append((start, end - start))
        start, end = offset, offset + length
    if end > start:
        out.append((start, end - start))
    return out


def check(pairs: Sequence[Run], name: str, nbytes: int) -> None:
    """Raise TransferError unless every run lies inside the region `name` of `nbytes`."""
    for offset, length in pairs:
        if offset < 0 or length < 0 or offset + length > nbytes:
            raise TransferError(f"bytes {offset}..{offset + length} are outside region {name!r} of {nbytes} bytes")


def pack(pairs: Sequence[Run]) -> bytes:
    return b"".join([_RUN.pack(*run) for run in pairs])


def unpack_runs(data: memoryview) -> list[Run]:
    """Inverse of `pack`. Raises TransferError when the data is cut short."""
    if len(data) % _RUN.size:
        raise TransferError(f"a list of runs has {len(data)} bytes, which is no multiple of {_RUN.size}")
    numbers = unpack(f"<{len(data) // 8}Q", data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class Cursor:
    """The bytes of `pairs` in `memory`, handed out in order."""

    def __init__(self, memory: memoryview, pairs: Sequence[Run]) -> None:
        self.left = sum(length for _, length in pairs)  # bytes not handed out yet
        self._memory = memory
        self._pairs = pairs
        self._index = 0
        self._used = 0  # bytes of the current run

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next `nbytes`; ValueError beyond the end."""
        if nbytes > self.left:
            raise ValueError(f"{nbytes} bytes are wanted, {self.left} are left")
        self.left -= nbytes
        views: list[memoryview] = []
        while nbytes:
            offset, length = self._pairs[self._index]
            start = offset + self._used
            count = min(length - self._used, nbytes)
            views.append(self._memory[start : start + count])
            nbytes -= count
            self._used += count
            if self._used == length:
                self._index += 1
                self._used = 0
        return views

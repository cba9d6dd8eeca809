"""Spans: the byte ranges that a transfer moves. Pure.

A submission is a list of (local offset, remote offset, length). Neighbours are merged; each side's bytes then form one
stream in the order of the list. A Cursor returns this stream in pieces of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, eq, itemgetter
from struct import Struct
from struct import pack as pack_struct

from net.errors import TransferError

Span = tuple[int, int, int]
"""(local offset, remote offset, length), bytes."""

Run = tuple[int, int]
"""(offset, length), bytes."""

_RUN = Struct("<2Q")
_SPAN = Struct("<3Q")
_LENGTH_OF_RUN, _LENGTH_OF_SPAN = itemgetter(1), itemgetter(2)
VECTORIZE_ABOVE = 4


def merged(spans: Sequence[Span], name: str, nbytes: int) -> tuple[Sequence[Span], int]:
    """The spans with neighbours joined where both sides continue, and their total length. Raises TransferError
    unless every span is inside the local region `name` of `nbytes`."""
    if not spans:
        return (), 0
    if len(spans) == 1:
        here, _, length = spans[0]
        if min(spans[0]) >= 0 and here + length <= nbytes:
            return (spans, length) if length else ((), 0)
    local, remote, lengths = zip(*spans, strict=True)
    if min(min(local), min(remote), min(lengths)) < 0 or max(map(add, local, lengths)) > nbytes:
        wrong = next(one for one in spans if min(one) < 0 or one[0] + one[2] > nbytes)
        raise TransferError(f"span {tuple(wrong)} is outside region {name!r} of {nbytes} bytes")
    if 0 in lengths or (_touch(local, lengths) and _touch(remote, lengths)):
        spans = _join(spans)
    return spans, sum(lengths)


def sides(spans: Sequence[Span]) -> tuple[list[Run], list[Run]]:
    """(here, there): the runs of each side of merged spans; at least one span."""
    if len(spans) == 1:
        here, there, length = spans[0]
        return [(here, length)], [(there, length)]
    local, remote, lengths = zip(*spans, strict=True)
    return runs(local, lengths), runs(remote, lengths)


def total(spans: Sequence[Span]) -> int:
    """Bytes of the spans."""
    return spans[0][2] if len(spans) == 1 else sum(map(_LENGTH_OF_SPAN, spans))


def runs(offsets: Sequence[int], lengths: Sequence[int]) -> list[Run]:
    """One side of merged spans, neighbours joined."""
    pairs = list(zip(offsets, lengths, strict=True))
    if not _touch(offsets, lengths):
        return pairs
    return [(offset, length) for offset, _, length in _join([(offset, offset, length) for offset, length in pairs])]


def _touch(offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether any piece begins where the previous one ends. Fast, because most lists have no such piece."""
    return any(map(eq, map(add, offsets, lengths), offsets[1:]))


def _join(spans: Sequence[Span]) -> list[Span]:
    out: list[Span] = []
    first_local = first_remote = so_far = 0
    for local, remote, length in spans:
        if local == first_local + so_far and remote == first_remote + so_far:
            so_far += length
            continue
        if so_far:
            out.append((first_local, first_remote, so_far))
        first_local, first_remote, so_far = local, remote, length
    if so_far:
        out.append((first_local, first_remote, so_far))
    return out


def slices(spans: Sequence[Span], nbytes: int) -> Iterator[list[Span]]:
    """The spans in lists of `nbytes` in total; the last may be shorter. Spans are cut where a list ends."""
    piece: list[Span] = []
    room = nbytes
    for local, remote, length in spans:
        while length >= room:
            piece.append((local, remote, room))
            yield piece
            local, remote, length = local + room, remote + room, length - room
            piece, room = [], nbytes
        if length:
            piece.append((local, remote, length))
            room -= length
    if piece:
        yield piece


def check(pairs: Sequence[Run], name: str, nbytes: int) -> None:
    """Raise TransferError unless every run is inside the region `name` of `nbytes`."""
    if len(pairs) > VECTORIZE_ABOVE:  # without Python code per span: there may be thousands of small ones
        offsets, lengths = zip(*pairs, strict=True)
        if min(offsets) >= 0 and min(lengths) >= 0 and max(map(add, offsets, lengths)) <= nbytes:
            return
    for offset, length in pairs:
        if offset < 0 or length < 0 or offset + length > nbytes:
            raise TransferError(f"bytes {offset}..{offset + length} are outside region {name!r} of {nbytes} bytes")


def pack(pairs: Sequence[Run]) -> bytes:
    return pack_struct(f"<{2 * len(pairs)}Q", *chain.from_iterable(pairs))


def unpack(data: memoryview) -> list[Run]:
    """Inverse of `pack`. Raises TransferError if the data is truncated."""
    if len(data) % _RUN.size:
        raise TransferError(f"a list of runs has {len(data)} bytes, which is not a multiple of {_RUN.size}")
    return list(_RUN.iter_unpack(data))


def pack_spans(spans: Sequence[Span]) -> bytes:
    """24 bytes per span."""
    return pack_struct(f"<{3 * len(spans)}Q", *chain.from_iterable(spans))


def unpack_spans(data: memoryview) -> list[Span]:
    """Inverse of `pack_spans`. Raises TransferError if the data is truncated."""
    if len(data) % _SPAN.size:
        raise TransferError(f"a list of spans has {len(data)} bytes, which is not a multiple of {_SPAN.size}")
    return list(_SPAN.iter_unpack(data))


class Cursor:
    """Returns the bytes of `pairs` in `memory` in order."""

    def __init__(self, memory: memoryview, pairs: Sequence[Run]) -> None:
        self.left = pairs[0][1] if len(pairs) == 1 else sum(map(_LENGTH_OF_RUN, pairs))  # bytes not returned yet
        self._memory = memory
        self._pairs = pairs
        self._index = 0
        self._used = 0  # bytes of the current run

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next `nbytes`. Raises ValueError beyond the end."""
        if nbytes > self.left:
            raise ValueError(f"{nbytes} bytes requested, but only {self.left} remain")
        memory, pairs, index, used = self._memory, self._pairs, self._index, self._used
        if nbytes == self.left:  # the most frequent case
            self.left = 0
            if not nbytes:
                return []
            first, length = pairs[index]
            views = [memory[first + used : first + length]]
            if len(pairs) > 1:
                views += [memory[offset : offset + length] for offset, length in pairs[index + 1 :]]
            return views
        self.left -= nbytes
        views = []
        while nbytes:
            offset, length = pairs[index]
            count = min(length - used, nbytes)
            views.append(memory[offset + used : offset + used + count])
            nbytes -= count
            used += count
            if used == length:
                index += 1
                used = 0
        self._index, self._used = index, used
        return views

"""One question to a home over TCP: blocks between the home and pieces of the caller's memory.

The bytes move between the socket and the pieces; checksums are computed while the next bytes are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xxhash import xxh3_64, xxh3_64_intdigest

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.bulk_messages import GET, PUT, Get, Got, Put, PutEnd
from cache.messages import Taken
from cache.offer import Offer
from cache.protocol import join_keys
from net.bodies import answered, encode
from net.channel.wire import nowhere
from net.errors import RemoteError
from net.transfer.tcp.bulk_call import BulkCall, Views, joined
from net.transfer.tcp.pushing import SMALL_FRAME_BYTES

PIECE_BYTES = 256 << 10

Room = Callable[[int, int], Sequence[memoryview] | None]
"""(position, bytes of the block) -> where the block goes, pieces of exactly that many bytes; None: nowhere."""


class Digests:
    """Checksums of blocks, each in pieces, as far as their bytes have moved."""

    def __init__(self, blocks: Sequence[Sequence[memoryview]]) -> None:
        cut = [[part for piece in pieces for part in _cut(piece)] for pieces in blocks]
        self._pieces = [(at, piece) for at, pieces in enumerate(cut) for piece in pieces]
        self._states: list[Any] = [None if len(pieces) == 1 else xxh3_64() for pieces in cut]
        self._sums: list[int] = [0] * len(blocks)
        self._next = 0  # piece
        self._moved = 0  # bytes of the pieces before it

    def until(self, moved: int) -> None:
        """The first `moved` bytes have moved: digests the pieces that are complete."""
        while self._next < len(self._pieces):
            at, piece = self._pieces[self._next]
            if self._moved + len(piece) > moved:
                return
            if self._states[at] is None:
                self._sums[at] = xxh3_64_intdigest(piece)
            else:
                self._states[at].update(piece)
            self._moved += len(piece)
            self._next += 1

    def all(self) -> list[int]:
        """Per block; everything has moved."""
        while self._next < len(self._pieces):
            self.until(self._moved + len(self._pieces[self._next][1]))
        return [
            total if state is None else state.intdigest() for total, state in zip(self._sums, self._states, strict=True)
        ]


def _cut(piece: memoryview) -> Sequence[memoryview]:
    """The piece in parts that are digested while the next one moves."""
    if len(piece) <= PIECE_BYTES:
        return (piece,)
    return [piece[start : start + PIECE_BYTES] for start in range(0, len(piece), PIECE_BYTES)]


class PutQuestion(BulkCall):
    """A put of `blocks`, each in pieces."""

    def __init__(self, keys: Sequence[BlockKey], blocks: Sequence[Sequence[memoryview]], offer: Offer) -> None:
        lengths = [sum(map(len, pieces)) for pieces in blocks]
        nbytes = sum(lengths)
        self._count = len(keys)
        self._blocks, self._digests = blocks, Digests(blocks)
        whole = nbytes <= SMALL_FRAME_BYTES
        put = Put(join_keys(keys), lengths, offer, self._digests.all() if whole else ())
        super().__init__(PUT, encode(put), nbytes)
        self.sends, self.is_whole = nbytes, whole

    def data(self) -> Views:
        return Views(joined([piece for pieces in self._blocks for piece in pieces]))

    def sent(self, moved: int) -> None:
        self._digests.until(moved)

    def tail(self) -> dict[str, Any]:
        return encode(PutEnd(self._digests.all()))

    def stored(self) -> Sequence[int] | None:
        """The home's answers for a leading part of the keys (cache/protocol.py); None if it gave none."""
        try:
            return answered(Taken, self.answer).check(self._count).slots
        except RemoteError:
            return None


class GetQuestion(BulkCall):
    """A get of `keys`, whose blocks go where `room` says."""

    def __init__(self, keys: Sequence[BlockKey], slot_bytes: int, room: Room) -> None:
        super().__init__(GET, encode(Get(join_keys(keys))), len(keys) * slot_bytes)
        self._count, self._slot_bytes, self._room = len(keys), slot_bytes, room
        self.hot: Sequence[tuple[int, int]] = ()
        """(position, replicas) of blocks that other homes have, too."""
        self._found: list[int] = []
        self._kept: list[bool] = []
        self._sums: Sequence[int] = ()
        self._digests = Digests(())

    def place(self, body: dict[str, Any], nbytes: int) -> Views:
        got = answered(Got, body).check(self._count)
        self.hot = got.hot
        slots = range(self._count) if got.slots is None else got.slots
        found = [position for position, slot in enumerate(slots) if slot >= 0]
        lengths = got.lengths or [self._slot_bytes] * len(found)
        if sum(lengths) != nbytes or max(lengths) > self._slot_bytes or min(lengths) < 1:
            raise RemoteError(f"{nbytes} bytes are not {len(found)} blocks of these lengths", "bad_answer")
        rooms = [self._room(position, length) for position, length in zip(found, lengths, strict=True)]
        blocks = [nowhere(length) if room is None else room for room, length in zip(rooms, lengths, strict=True)]
        self._found, self._kept, self._sums = found, [room is not None for room in rooms], got.checksums
        self._digests = Digests(blocks)
        return Views([piece for pieces in blocks for piece in pieces])

    def received(self, moved: int) -> None:
        super().received(moved)
        self._digests.until(moved)

    def arrived(self) -> tuple[list[int], list[int]]:
        """Positions of the intact blocks that have a place, and of damaged ones."""
        whole: list[int] = []
        bad: list[int] = []
        rows = zip(self._found, self._kept, self._sums, self._digests.all(), strict=True)
        for position, kept, wanted, total in rows:
            if kept:
                (whole if wanted in (UNCHECKED, total) else bad).append(position)
        return whole, bad

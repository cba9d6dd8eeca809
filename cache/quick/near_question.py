"""TakeQuestion: a put to a home on this host, which copies the blocks from this process's memory
(cache/server/taking.py)."""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import BlockKey
from cache.messages import TAKE, Take, TakenThere
from cache.offer import Offer
from cache.protocol import join_keys
from cache.stable_marks import Mark
from net.bodies import answered, encode
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.tcp.bulk_call import BulkCall

ALIGN = 64  # bytes


def room_for(blocks: Sequence[Sequence[memoryview]]) -> int:
    """Bytes of shared memory that a question about these blocks needs."""
    return sum(_aligned(sum(map(len, pieces))) for pieces in blocks)


class TakeQuestion(BulkCall):
    """Copies `blocks`, each in pieces, to `start` of `region`, which the home maps, when it is asked. Hold `mark` until
    it has ended."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[Sequence[memoryview]],
        offer: Offer,
        region: Region,
        start: int,
        slot_bytes: int,
        mark: Mark,
    ) -> None:
        lengths = [sum(map(len, pieces)) for pieces in blocks]
        offsets = []
        for length in lengths:
            offsets.append(start)
            start += _aligned(length)
        self._count = len(keys)
        self._blocks, self._region, self._offsets = blocks, region, offsets
        take = Take(join_keys(keys), slot_bytes, region.name, offsets, mark, lengths, offer=offer)
        super().__init__(TAKE, encode(take), 0)

    def begin(self) -> None:
        super().begin()
        memory = self._region.memory
        for at, pieces in zip(self._offsets, self._blocks, strict=True):
            for piece in pieces:
                memory[at : at + len(piece)] = piece
                at += len(piece)

    def stored(self) -> Sequence[int] | None:
        """See PutQuestion."""
        taken = self._taken()
        return None if taken is None or not taken.mapped else taken.slots

    @property
    def unmapped(self) -> bool:
        """The home cannot access this memory, or not yet."""
        taken = self._taken()
        return taken is not None and not taken.mapped

    def _taken(self) -> TakenThere | None:
        try:
            return answered(TakenThere, self.answer).check(self._count)
        except RemoteError:
            return None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN

"""StoreCall: the state of one get or put, and the parts common to both directions: spans, pieces, checksums."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cache.arena import checksum
from cache.block import BlockKey
from cache.pool.policy import Facts
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.common.path import LOCAL
from net.transfer.engine import BULK, TransferEngine

MESSAGE_BLOCK_BYTES = 16 << 10  # blocks up to this size travel in the messages themselves ...
MESSAGE_BYTES = 512 << 10  # ... up to this many bytes per message
NEAR_MESSAGE_BYTES = 96 << 10  # to homes whose memory this node can access: above this, transfers cost less
NEAR_BULK_BYTES = 1 << 20  # of one put to homes of this host: a socket moves up to this many faster than two messages
INLINE_BYTES = 2 << 20  # a checksum of more bytes, about 0.15 ms, leaves the event loop: a hop costs 0.1 ms
PIECE_BYTES = 4 << 20  # of one transfer
PIECES = 3  # in flight per call and home: one is checksummed, others move, and the next is requested

Peer = TypeVar("Peer")


@dataclass(slots=True)
class StoreCall:
    """Block i is keys[i], at offsets[i] of `region`; `lengths[i]`: its bytes, block_bytes if absent. The caller of a
    put gives them; a get fills them in as blocks arrive."""

    keys: Sequence[BlockKey]
    region: Region
    offsets: Sequence[int]
    block_bytes: int
    lengths: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)  # checksums by position, of a put
    in_messages: bool = False  # the blocks are small or few: no leases and no transfers
    near_in_messages: bool = False  # the same, for homes whose memory this node can access
    near_ask: bool = False  # few enough bytes for a bulk call instead of shared memory
    facts: Sequence[Facts] = ()  # of a put: one per block, one for all, or none
    kept: Sequence[bool] = ()  # of a repair: which blocks are never evicted here
    repair: bool = False  # of a put: the blocks are copies from another home
    priority: int = BULK  # of a put: of its bytes among those of this node
    agree: bool = False  # of a put: the keys do not name their content, so the homes have to agree on it
    replicas: int = 0  # of a put: copies of each block, if more than the cluster's
    durable: bool = False  # of a put: it ends when the block is synced on a home's SSD
    keep: bool = False  # of a put: homes must never evict the block
    ttl_s: float = 0.0  # of a put: the blocks are copies from another site (cache/sites/copies.py); 0 = they are not
    arrived: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # position -> home, transport, tier
    stored: set[int] = field(default_factory=set)  # of a put: positions of blocks that it added to the pool
    present: set[int] = field(default_factory=set)  # positions that the pool already had
    refused: set[int] = field(default_factory=set)  # positions for which a home had no room in the end
    over: set[int] = field(default_factory=set)  # positions that a home refused because of their tenant's quota
    on_disk: set[int] = field(default_factory=set)  # with `durable`: positions synced on SSD
    pinned: set[int] = field(default_factory=set)  # with `keep`: positions that are pinned
    trouble: set[str] = field(default_factory=set)  # the homes' reasons, from their disks or limits, when they failed

    def by_message(self, transfer: TransferEngine, home: str) -> bool:
        """Whether the blocks travel to or from `home` in messages."""
        near = transfer.path_of(home) is LOCAL or transfer.is_one_sided(home) or transfer.may_be_one_sided(home)
        return self.near_in_messages if near else self.in_messages

    def length(self, position: int) -> int:
        return self.lengths.get(position, self.block_bytes)

    def note_lengths(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        """A home is about to send blocks of these lengths; none: all fill their slots."""
        for position, length in zip(positions, lengths or [self.block_bytes] * len(positions), strict=True):
            if length != self.block_bytes:
                self.lengths[position] = length
            else:
                self.lengths.pop(position, None)  # of a shorter block that another home failed to send

    def nbytes(self, positions: Sequence[int]) -> int:
        """The sum of their bytes."""
        return sum(map(self.length, positions)) if self.lengths else len(positions) * self.block_bytes

    def span(self, position: int, slot: int, slot_bytes: int) -> tuple[int, int, int]:
        """(local offset, remote offset, bytes) of a block at a home. Raises RemoteError when the layouts differ."""
        if slot_bytes != self.block_bytes:
            raise RemoteError(f"the home has blocks of {slot_bytes} bytes, this node of {self.block_bytes}", "layout")
        return self.offsets[position], slot * slot_bytes, self.length(position)

    def sums_of(self, positions: Sequence[int]) -> list[int]:
        """Checksums of the blocks in the region."""
        memory, out = self.region.memory, []
        for position in positions:
            start = self.offsets[position]
            out.append(checksum(memory[start : start + self.length(position)]))
        return out

    async def checksums(self, positions: Sequence[int]) -> list[int]:
        """The same without blocking the loop."""
        if self.nbytes(positions) <= INLINE_BYTES:
            return self.sums_of(positions)
        return await asyncio.to_thread(self.sums_of, positions)


def pieces(count: int, block_bytes: int) -> Iterator[slice]:
    """Slices of `count` blocks, each of about PIECE_BYTES."""
    step = max(1, PIECE_BYTES // block_bytes)
    for first in range(0, count, step):
        yield slice(first, min(count, first + step))


async def in_pieces(count: int, block_bytes: int, work: Callable[[slice], Coroutine[Any, Any, None]]) -> None:
    """Run `work` for every piece of `count` blocks, PIECES at the same time. When one fails, no other begins; when all
    have ended, its exception is raised."""
    waiting = deque(pieces(count, block_bytes))
    if len(waiting) == 1:
        await work(waiting.popleft())
        return

    async def worker() -> None:
        try:
            while waiting:
                await work(waiting.popleft())
        except BaseException:
            waiting.clear()
            raise

    ends = await asyncio.gather(*(worker() for _ in range(min(PIECES, len(waiting)))), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


async def at_each(
    groups: Mapping[Peer, list[int]], work: Callable[[Peer, list[int]], Coroutine[Any, Any, None]]
) -> None:
    """Run `work` for all groups concurrently; when all have ended, raise the exception of one that failed."""
    if len(groups) == 1:
        for pair in groups.items():
            await work(*pair)
        return
    ends = await asyncio.gather(*(work(*pair) for pair in groups.items()), return_exceptions=True)
    for end in ends:  # only now, when no home's transfer is in progress
        if end is not None:
            raise end

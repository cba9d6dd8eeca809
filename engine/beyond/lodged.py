"""The room in the tiers of one request beyond memory, and its blocks on their way there and back.

A *place* names one cold block: a slot of the DRAM tier; from the number of slots on, a block on SSD; below 0, a block
on another node. DRAM blocks are attended where they lie: on a CPU, the tier is memory like the arena. Blocks on SSD
come through the window. Parts of them are compared with checksums of their layers, which are kept here while the
request lives. Other nodes are asked about theirs (elsewhere.py).

The tier writes one thing after the other, and a batch of other blocks may be before a cold one. So the engine thread
leaves a copy and goes on; until the block is on disk, it is read from the copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np

from attention.parts import Part
from cache.arena import UNCHECKED, checksum
from cache.block import BlockKey
from cache.pool.policy import PLAIN, Facts
from cache.ssd.medium import Entry
from cache.tiers.lodging import Lodging, SsdLodging
from engine.beyond.held import HeldBlocks
from engine.beyond.window import Reader, Reading, Rows
from engine.step.cold import Places
from sched.beyond import ColdSteps

COPIED_BYTES = 64 << 20
"""Of blocks that wait for the disk. A disk that is so far behind is slower than the model, which waits for it then."""


class Damaged(OSError):
    """A part of a block on SSD is not what was written."""


@dataclass(slots=True)
class Done:
    """What requests beyond memory have done on this node so far."""

    requests: int = 0
    tokens: int = 0  # that have passed all layers
    to_dram: int = 0  # blocks
    to_ssd: int = 0
    dram_bytes: int = 0  # attended to


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena and the DRAM tier of one node, and the way from its SSD."""

    tier: Rows
    arena: Rows
    reader: Reader
    near: Any  # a tensor: the tier's memory [slots * layers, planes, num_kv_heads, block_size, head_size]
    checksums: bool  # --block-checksums

    @property
    def num_slots(self) -> int:
        return len(self.tier) // self.reader.num_layers

    @property
    def block_bytes(self) -> int:
        return int(self.reader.num_layers * self.arena.shape[1])

    def block(self, block_id: int) -> Rows:
        """[layers, bytes of a layer] of a block of the arena."""
        layers = self.reader.num_layers
        return self.arena[block_id * layers : (block_id + 1) * layers]

    def slot(self, slot: int) -> Rows:
        """The same of a slot."""
        layers = self.reader.num_layers
        return self.tier[slot * layers : (slot + 1) * layers]

    def store(self, block_id: int, slot: int) -> int:
        """Copy a block of the arena to a slot of the tier; returns its checksum."""
        to = self.slot(slot)
        to[:] = self.block(block_id)
        return checksum(to.data.cast("B")) if self.checksums else UNCHECKED

    def rate(self, slots: Sequence[int], block_id: int) -> float:
        """Bytes/s of reading these slots, one after the other into the same block, without computation."""
        begin, into = time.perf_counter(), self.block(block_id)
        for slot in slots:
            np.copyto(into, self.slot(slot))
        return len(slots) * self.block_bytes / (time.perf_counter() - begin)


class Pass:
    """One pass over some layers of the cold blocks (engine.step.cold.Pieces), as a context."""

    def __init__(
        self,
        slots: Sequence[int],
        reading: Reading,
        layers: range,
        memory: Memory,
        held: tuple[HeldBlocks, int] | None,
    ) -> None:
        """slots: those in DRAM; reading: of those on SSD; held: those on other nodes, the first n of them."""
        self._first = np.array(slots, dtype=np.int32) * memory.reader.num_layers
        self._reading, self._layer = reading, layers.start
        self.near, self._held = memory.near, held

    def __enter__(self) -> Pass:
        self._reading.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._reading.__exit__(kind, error, where)

    def ask(self, q: Any, scale: float, soft_cap: float) -> Callable[[], Iterable[Part]]:
        """See engine.step.cold.Pieces."""
        if self._held is None:
            return tuple
        blocks, count = self._held
        return blocks.ask(self._layer, q, count, scale, soft_cap)

    def layer(self) -> tuple[Places, Iterator[Places]]:
        """See engine.step.cold.Pieces."""
        places = self._first + np.int32(self._layer)
        self._layer += 1
        return places, self._reading.layer()


@dataclass(eq=False, slots=True)
class Far:
    """A block on SSD, or on its way there."""

    checksums: list[int]  # of its layers
    entry: Entry | None = None  # None: on its way
    # while it is on its way:
    key: BlockKey = b""
    checksum: int = UNCHECKED  # of the whole block
    copy: Rows | None = None  # [layers, bytes of a layer]
    written: Future[Entry] | None = None


class RequestRoom:
    """An engine.step.cold.Lodged. `steps` and `done` are the node's. held: blocks on other nodes."""

    def __init__(
        self,
        lodging: Lodging,
        far: SsdLodging | None,
        memory: Memory,
        steps: ColdSteps,
        done: Done,
        held: HeldBlocks | None = None,
    ) -> None:
        self._lodging, self._ssd, self._held = lodging, far, held
        self._memory, self._steps, self._done = memory, steps, done
        self._far: list[Far] = []
        self._copied: deque[Far] = deque()  # those that may still have a copy, the oldest first
        self._settling = Lock()

    def read(self, places: Sequence[int], window: Sequence[int], layers: range) -> Pass:
        border = self._memory.num_slots
        slots = [place for place in places if 0 <= place < border]
        far = [place - border for place in places if place >= border]
        count = len(places) - len(slots) - len(far)
        held = None if self._held is None or not count else (self._held, count)
        return Pass(slots, self._memory.reader.read(self._fill, far, window, layers), layers, self._memory, held)

    def near_of(self, places: Sequence[int]) -> Any | None:
        """See engine.step.cold.Lodged."""
        return self._memory.near if all(0 <= place < self._memory.num_slots for place in places) else None

    def _fill(self, place: int, layer: int, into: memoryview) -> None:
        far = self._far[place]
        copy, written = far.copy, far.written
        if copy is not None and written is not None and not written.done():
            into[:] = copy[layer].data
            return
        entry = self._settled(far)
        assert self._ssd is not None
        self._ssd.read(entry, layer * len(into), into)
        if checksum(into) != far.checksums[layer]:
            raise Damaged("a block beyond memory was removed from the SSD tier, or is damaged there")

    def store(self, block_id: int, slot: int, key: BlockKey) -> int:
        if slot < 0:
            assert self._held is not None
            block = self._memory.block(block_id).data.cast("B")
            found = checksum(block) if self._memory.checksums else UNCHECKED
            self._held.store(-1 - slot, block, found, key)
            return found
        if slot < self._memory.num_slots:
            self._done.to_dram += 1
            return self._memory.store(block_id, slot)
        assert self._ssd is not None and slot == self._memory.num_slots + len(self._far)
        while len(self._copied) >= max(1, COPIED_BYTES // self._memory.block_bytes):
            self._settled(self._copied.popleft())
        copy = self._memory.block(block_id).copy()
        whole = copy.data.cast("B")
        far = Far([checksum(row.data) for row in copy], None, key, checksum(whole), copy)
        far.written = self._ssd.put(key, whole, far.checksum, PLAIN)
        self._far.append(far)
        self._copied.append(far)
        self._done.to_ssd += 1
        return far.checksum

    def _settled(self, far: Far) -> Entry:
        """Wait until the block is on SSD, and drop its copy. Raises SsdError or Damaged."""
        with self._settling:
            if far.entry is not None:
                return far.entry
            assert far.written is not None and far.copy is not None and self._ssd is not None
            entry: Entry | None = far.written.result()
            if entry is not None and entry.checksum != far.checksum:  # the tier had it, rounded in another way
                rows = np.empty_like(far.copy)
                entry = self._ssd.take(far.key, rows.data.cast("B"))
                far.checksums = [checksum(row.data) for row in rows]
            if entry is None:
                raise Damaged("a block beyond memory is damaged in the SSD tier")
            far.entry, far.copy, far.written = entry, None, None
            return entry

    def settle(self) -> None:
        """Wait until all blocks are on SSD. Raises SsdError or Damaged."""
        wait([far.written for far in self._far if far.written is not None])
        for far in self._far:
            self._settled(far)

    def rate(self, places: Sequence[int], window: Sequence[int]) -> float:
        """Bytes/s of reading these places on SSD through the window, without computation."""
        begin, layers = time.perf_counter(), range(self._memory.reader.num_layers)
        with self.read(places, window, layers) as one:
            for _ in layers:
                for _ in one.layer()[1]:
                    pass
        return len(places) * self._memory.block_bytes / (time.perf_counter() - begin)

    def adopt(self, keys: Sequence[BlockKey]) -> int:
        """Hold the leading run of `keys` that is on SSD and verify it; returns its length. Blocks, not on the loop."""
        if self._ssd is None:
            return 0
        rows = np.empty((self._memory.reader.num_layers, self._memory.arena.shape[1]), np.uint8)
        for count, key in enumerate(keys):
            entry = self._ssd.take(key, rows.data.cast("B"))
            if entry is None:
                return count
            self._far.append(Far([checksum(row.data) for row in rows], entry))
        return len(keys)

    def name(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> None:
        """A block on SSD or on another node has its name since it was stored."""
        if 0 <= slot < self._memory.num_slots:
            self._lodging.name(key, slot, block_checksum, facts)

    def ran(self, tokens: int, places: Sequence[int], hot: int, seconds: float) -> None:
        """Only decode steps predict others; a chunk computes more, and one that asks waits."""
        own = [place for place in places if place >= 0]
        near = sum(place < self._memory.num_slots for place in own) * self._memory.block_bytes
        far = len(own) * self._memory.block_bytes - near
        self._done.tokens += tokens
        self._done.dram_bytes += near
        if tokens == 1 and places and len(own) == len(places):
            self._steps.observe(near + hot * self._memory.block_bytes, far, seconds)

    def close(self) -> None:
        self._lodging.close()
        if self._held is not None:
            self._held.close()
        if self._ssd is not None:
            self._ssd.close()
        self._far.clear()
        self._copied.clear()

"""Lodged: the room in the tier of one request beyond memory, and its blocks on their way there and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cache.arena import UNCHECKED, checksum
from cache.block import BlockKey
from cache.pool.policy import Facts
from cache.tiers.lodging import Lodging
from engine.beyond.window import Reader, Reading, Rows
from sched.beyond import ColdSteps


@dataclass(slots=True)
class Done:
    """What requests beyond memory have done on this node so far."""

    requests: int = 0
    tokens: int = 0  # computed over cold blocks
    cold_blocks: int = 0  # stored to the tier


@dataclass(frozen=True, slots=True)
class Memory:
    """The two arenas and the way between them, of one node."""

    tier: Rows
    arena: Rows
    reader: Reader
    block_bytes: int
    checksums: bool  # --block-checksums

    def store(self, block_id: int, slot: int) -> int:
        """Copy a block of the arena to a slot of the tier; returns its checksum."""
        layers = self.reader.num_layers
        to = self.tier[slot * layers : (slot + 1) * layers]
        to[:] = self.arena[block_id * layers : (block_id + 1) * layers]
        return checksum(memoryview(to).cast("B")) if self.checksums else UNCHECKED


    def rate(self, slots: Sequence[int], window: Sequence[int]) -> float:
        """Bytes/s of reading these slots into the window, without computation."""
        begin = time.perf_counter()
        layers = range(self.reader.num_layers)
        with self.reader.read(slots, window, layers) as reading:
            for _ in layers:
                for _ in reading.layer():
                    pass
        return len(slots) * self.block_bytes / (time.perf_counter() - begin)


class RequestRoom:
    """An engine.step.cold.Lodged. `steps` and `done` are the node's."""

    def __init__(self, lodging: Lodging, memory: Memory, steps: ColdSteps, done: Done) -> None:
        self._lodging, self._memory, self._steps, self._done = lodging, memory, steps, done

    def read(self, slots: Sequence[int], window: Sequence[int], layers: range) -> Reading:
        return self._memory.reader.read(slots, window, layers)

    def store(self, block_id: int, slot: int) -> int:
        return self._memory.store(block_id, slot)

    def name(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> None:
        self._lodging.name(key, slot, block_checksum, facts)
        self._done.cold_blocks += 1

    def ran(self, tokens: int, cold_blocks: int, seconds: float) -> None:
        """Only a decode step predicts the others; a chunk computes more."""
        self._done.tokens += tokens
        if tokens == 1 and cold_blocks:
            self._steps.observe(cold_blocks * self._memory.block_bytes, seconds)

    def close(self) -> None:
        self._lodging.close()

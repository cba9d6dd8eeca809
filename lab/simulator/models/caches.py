"""The locations of blocks: on one node, in the pool, and on all nodes as digests report them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from cache.pool.policy import EvictionPolicy, Facts

Vector = npt.NDArray[np.float64]


class Cache:
    """Blocks under one eviction policy; `changed(block, present)` is called for every change."""

    def __init__(
        self, policy: EvictionPolicy, capacity: int, changed: Callable[[int, bool], None] = lambda block, here: None
    ) -> None:
        """capacity: blocks; 0 holds nothing."""
        self.capacity = capacity
        self.blocks: set[int] = set()
        self.evicted = 0
        self._policy = policy
        self._changed = changed

    def run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that are here."""
        here = self.blocks
        for count, block in enumerate(blocks):
            if block not in here:
                return count
        return len(blocks)

    def use(self, blocks: Sequence[int], facts: Sequence[Facts]) -> None:
        """A prompt was computed: touch each of its blocks, from the last to the first, or insert it and evict another,
        so that among equals a prompt's end is evicted before its beginning."""
        if not self.capacity:
            return
        here, policy, changed = self.blocks, self._policy, self._changed
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            if block in here:
                policy.touched(block)
                continue
            if len(here) == self.capacity:
                self._drop(cast(int, policy.victim()))
                self.evicted += 1
            policy.added(block, facts[position])
            here.add(block)
            changed(block, True)

    def clear(self) -> None:
        """The node lost its memory."""
        self.drop(list(self.blocks))

    def drop(self, blocks: Sequence[int]) -> None:
        """These blocks, which must all be here, are lost."""
        for block in blocks:
            self._drop(block)

    def _drop(self, block: int) -> None:
        self._policy.removed(block)
        self.blocks.remove(block)
        self._changed(block, False)


class Directory:
    """Block -> holders, as a bit mask. Changes become visible after `delay_s`, as with digests: the fast stand-in for
    gossip.py."""

    kind = "fast"

    def __init__(self, size: int, delay_s: float = 0.0) -> None:
        self._size = size
        self._delay_s = delay_s
        self._masks: dict[int, int] = {}
        self._news: deque[tuple[float, int, int, bool]] = deque()

    def tell(self, now: float, node: int, block: int, present: bool) -> None:
        if self._delay_s:
            self._news.append((now + self._delay_s, node, block, present))
        else:
            self.apply(node, block, present)

    def depths(self, now: float, blocks: Sequence[int]) -> Vector:
        """[nodes]: leading blocks that each node holds."""
        while self._news and self._news[0][0] <= now:
            self.apply(*self._news.popleft()[1:])
        found = np.zeros(self._size)
        alive = (1 << self._size) - 1
        for depth, block in enumerate(blocks):
            kept = self._masks.get(block, 0) & alive
            if kept == alive:
                continue
            if depth:
                _fill(found, alive ^ kept, depth)
            alive = kept
            if not alive:
                return found
        _fill(found, alive, len(blocks))
        return found

    def apply(self, node: int, block: int, present: bool) -> None:
        """Apply a change immediately."""
        mask = self._masks.get(block, 0)
        mask = mask | 1 << node if present else mask & ~(1 << node)
        if mask:
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)


FEW_HOLDERS = 6
"""Up to this many bits of a mask, a loop over them is faster than numpy; each costs time by the length of the mask."""


def _fill(found: Vector, mask: int, depth: int) -> None:
    if mask.bit_count() > FEW_HOLDERS:
        bits = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        found[np.unpackbits(bits, bitorder="little").nonzero()[0]] = depth
        return
    while mask:
        low = mask & -mask
        found[low.bit_length() - 1] = depth
        mask ^= low

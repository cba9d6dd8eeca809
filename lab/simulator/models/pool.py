"""The pooled store: the nodes' DRAM as one cache, with their SSDs behind it, inclusive like cache/tiers/local_store.py.

Block b lives on node b mod N. What is put into DRAM is written behind to the SSD; what only the SSD has is read from
there by its node, all nodes at once, before it crosses the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from cache.pool.policy import EvictionPolicy, Facts
from lab.simulator.models.caches import Cache
from lab.simulator.models.disk import Disk


class Pool:
    """Of `nodes` nodes with dram_blocks and ssd_blocks each."""

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        dram_blocks: int,
        ssd_blocks: int,
        disks: Sequence[Disk],
        nbytes: float,
    ) -> None:
        """nbytes: of a block."""
        self.dram = Cache(policy(), dram_blocks * len(disks))
        self.ssd = Cache(policy(), ssd_blocks * len(disks))
        self.capacity = self.dram.capacity + self.ssd.capacity
        self._disks, self._nbytes = disks, nbytes
        self._down: set[int] = set()

    def run(self, blocks: Sequence[int]) -> int:
        """How many of the leading blocks can be had."""
        if not self.ssd.capacity:
            return self.dram.run(blocks)
        for count, block in enumerate(blocks):
            if block not in self.dram.blocks and not self._on_ssd(block):
                return count
        return len(blocks)

    def cold(self, blocks: Sequence[int]) -> Counter[int]:
        """How many of these each node has to read from its SSD, by node."""
        if not self.ssd.capacity:
            return Counter()
        return Counter(b % len(self._disks) for b in blocks if b not in self.dram.blocks and self._on_ssd(b))

    def read_s(self, cold: Counter[int]) -> float:
        """How long the slowest of the nodes would read that, from now on; 0 for nothing to read."""
        each = (self._disks[node].seconds(count, count * self._nbytes) for node, count in cold.items())
        return max(each, default=0.0)

    def read(self, blocks: Sequence[int], done: Callable[[], None]) -> None:
        """`done` is called when all of these are in DRAM."""
        cold = self.cold(blocks)
        if not cold:
            done()
            return
        left = len(cold)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for node, count in cold.items():
            self._disks[node].move(count, count * self._nbytes, ended)

    def use(self, blocks: Sequence[int], facts: Sequence[Facts]) -> None:
        """A prompt was computed."""
        self.dram.use(blocks, facts)
        if not self.ssd.capacity:
            return
        for node, count in Counter(b % len(self._disks) for b in blocks if b not in self.ssd.blocks).items():
            self._disks[node].move(count, count * self._nbytes, _nothing)
        self.ssd.use(blocks, facts)

    def lost(self, node: int) -> None:
        """A crash: its DRAM is empty, its SSD not to be had until it is `back`."""
        self.dram.drop([block for block in self.dram.blocks if block % len(self._disks) == node])
        self._down.add(node)

    def back(self, node: int) -> None:
        self._down.discard(node)

    def _on_ssd(self, block: int) -> bool:
        return block in self.ssd.blocks and block % len(self._disks) not in self._down


def _nothing() -> None:
    """Writes in the background: no request waits."""

"""The fast stand-in for the pooled store (shares.py): the nodes' DRAM as one cache, their SSDs behind it, inclusive.

Block b is on node b mod N. Blocks put into DRAM are written behind to the SSD. Each node reads blocks that only its SSD
has, in parallel with the other nodes, before they cross the network, all from one node drawn by their content.

On the same trace its hit rates are within 0.02 of those of the real classes, its mean TTFT within 10 %
(tests/lab/simulator/test_shares.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from cache.pool.policy import EvictionPolicy, Facts
from lab.simulator.models.caches import Cache
from lab.simulator.models.disk import Disk


class Pool:
    """The pool of all nodes, with dram_blocks and ssd_blocks each."""

    kind = "fast"
    raised = dropped = 0  # blocks of sessions: it has none

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        dram_blocks: int,
        ssd_blocks: int,
        disks: Sequence[Disk],
        nbytes: float,
    ) -> None:
        """nbytes: bytes of a block."""
        self.dram = Cache(policy(), dram_blocks * len(disks))
        self.ssd = Cache(policy(), ssd_blocks * len(disks))
        self.capacity = self.dram.capacity + self.ssd.capacity
        self._disks, self._nbytes = disks, nbytes
        self._down: set[int] = set()

    def run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that are available."""
        if not self.ssd.capacity:
            return self.dram.run(blocks)
        for count, block in enumerate(blocks):
            if block not in self.dram.blocks and not self._on_ssd(block):
                return count
        return len(blocks)

    def dram_run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that are in DRAM."""
        return self.dram.run(blocks)

    def sources(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node has."""
        return self._one(blocks, len(blocks))

    def missing(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node would have to get."""
        return self._one(blocks, len(blocks) - self.run(blocks))

    def _one(self, blocks: Sequence[int], count: int) -> Counter[int]:
        return Counter({hash((blocks[0], len(blocks))) % len(self._disks): count} if count else {})

    def cold(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node must read from its SSD."""
        if not self.ssd.capacity:
            return Counter()
        return Counter(b % len(self._disks) for b in blocks if b not in self.dram.blocks and self._on_ssd(b))

    def read_s(self, cold: Counter[int]) -> float:
        """Seconds that the slowest node would take to read these, starting now; 0 if there are none."""
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
        """A crash: its DRAM is empty, and its SSD is unavailable until `back`."""
        self.dram.drop([block for block in self.dram.blocks if block % len(self._disks) == node])
        self._down.add(node)

    def left(self, node: int) -> None:
        """Homes do not change."""

    def back(self, node: int) -> None:
        self._down.discard(node)

    def _on_ssd(self, block: int) -> bool:
        return block in self.ssd.blocks and block % len(self._disks) not in self._down


def _nothing() -> None:
    """For writes in the background, for which no request waits."""

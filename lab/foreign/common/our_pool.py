"""Three store nodes of ours as programs of others see them: addresses, contents, a lost node, a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache.store.client import Store
from lab.bench.common.client import Unreachable
from lab.launch.cluster import LocalCluster

NODES = "store=3"
DRAM_BYTES, SSD_BYTES = "768M", "2G"  # each
WAIT_S = 60.0


class OurPool:
    """Nodes with an SSD tier each. `value_bytes`: of a slot, as --value-bytes takes it."""

    def __init__(self, run_dir: Path, value_bytes: str, nodes: str = NODES) -> None:
        self._run_dir, self._nodes = run_dir, nodes
        sizes = ("--dram-bytes", DRAM_BYTES, "--ssd-bytes", SSD_BYTES, "--value-bytes", value_bytes)
        self.flags = ("--model", "none", *sizes, "--ssd-path", str(run_dir / "ssd-{node}"))
        self.cluster = self._cluster()

    def _cluster(self) -> LocalCluster:
        return LocalCluster(self._nodes, self.flags, run_dir=self._run_dir)

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        self.cluster.stop()

    def restart(self) -> None:
        """All nodes end, then nodes of the same names start: what they have is what was on SSD."""
        self.cluster.stop()
        self.cluster = self._cluster()
        self.cluster.start()

    @property
    def addresses(self) -> str:
        """HOST:PORT of every node, separated by commas."""
        return ",".join(node.url.removeprefix("http://") for node in self.cluster.nodes)

    def ssd(self, name: str) -> Path:
        """The directory of a node's SSD tier."""
        return self._run_dir / f"ssd-{name}"

    def tiers(self) -> list[dict[str, Any]]:
        """The statistics of the tiers of every node that answers."""
        address = next(node.url.removeprefix("http://") for node in self.cluster.living)
        with Store(address) as store:
            homes = store.stats()["homes"].values()
        return [stats["tiers"] for stats in homes if stats is not None]

    def blocks(self) -> int:
        """Blocks on SSD; a value that was just put is there a moment later."""
        return sum(tiers["ssd"]["blocks"] for tiers in self.tiers())

    def ssd_hits(self) -> int:
        """Blocks that nodes have read from SSD since their start."""
        return sum(tiers["ssd"]["hits"] for tiers in self.tiers())

    def start_again(self, name: str) -> None:
        """A killed node, with the same command; returns when every node sees it. Raises Unreachable."""
        node = self.cluster.repeat(name)
        self._wait(lambda: node.ready and self.cluster.formed(), f"{name} does not come back")

    def wait_for(self, blocks: int) -> None:
        """Until at least this many blocks are on SSD. Raises Unreachable."""
        self._wait(lambda: self.blocks() >= blocks, f"the pool does not get {blocks} blocks on SSD")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise Unreachable(f"{otherwise} in {WAIT_S:.0f} s")
            time.sleep(0.2)


@contextmanager
def our_pool(run_dir: Path, value_bytes: str) -> Iterator[OurPool]:
    """The pool while it runs."""
    pool = OurPool(run_dir, value_bytes)
    pool.start()
    try:
        yield pool
    finally:
        pool.stop()

"""Nodes of this machine that differ: a duty cycle makes some of them slow, and they are cheap."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lab.launch import rest
from lab.launch.cluster import LocalCluster, StartTimeout
from lab.launch.duty import slowed

CHECKED_S, POLL_S = 120.0, 0.2


@dataclass(frozen=True, slots=True)
class Slow:
    """Nodes, by name, that compute at `speed` (between 0 and 1) of the speed of this machine and cost `cost` per hour.
    The other nodes cost 1."""

    nodes: tuple[str, ...] = ()
    speed: float = 1.0
    cost: float = 1.0

    @property
    def flags(self) -> dict[str, tuple[str, ...]]:
        """The `role_flags` of a LocalCluster. A start would keep the steps of a slow node for the next start of any."""
        return dict.fromkeys(self.nodes, ("--node-cost", f"{self.cost:g}", "--calibration-cache", "off"))

    def price(self, node: str) -> float:
        return self.cost if node in self.nodes else 1.0

    def speed_of(self, node: str) -> float:
        return self.speed if node in self.nodes else 1.0


ALL_FAST = Slow()


@contextmanager
def throttled(cluster: LocalCluster, slow: Slow, figures: dict[str, Any]) -> Iterator[None]:
    """The slow nodes are slow and know it: they started at full speed, and every node measures its steps again when it
    is idle. At the end figures["ran"] is the share of the time in which they could run. Raises StartTimeout, RestError,
    OSError."""
    if not slow.nodes:
        yield
        return
    urls = {node.name: node.url for node in cluster.nodes if node.role != "store"}
    with slowed([cluster[name].pid for name in slow.nodes], slow.speed) as duty:
        _until_checked({urls[name]: 1 + checks(urls[name]) if name in slow.nodes else 1 for name in urls})
        yield
    figures["ran"] = duty.ran


def _until_checked(wanted: Mapping[str, int]) -> None:
    """Wait until every node, by URL, has compared its steps with its estimates this often."""
    deadline = time.monotonic() + CHECKED_S
    while any(checks(url) < count for url, count in wanted.items()):
        if time.monotonic() > deadline:
            raise StartTimeout(f"a node has not measured its steps within {CHECKED_S:g} s after slow nodes became slow")
        time.sleep(POLL_S)


def checks(url: str) -> int:
    """The checks of this idle node that came to an end (sched/idle_checks.py). Raises RestError."""
    told = rest.get(f"{url}/debug/state")["engine"]["idle_checks"]
    return int(told["right"]) + int(told["wrong"])

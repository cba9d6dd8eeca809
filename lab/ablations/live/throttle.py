"""Nodes of this machine that differ: a duty cycle makes some of them slow, and they are cheap."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

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
        """The `role_flags` of a LocalCluster. With a cache of calibrations, a node could start with what another
        one has measured at another speed."""
        return dict.fromkeys(self.nodes, ("--node-cost", f"{self.cost:g}", "--calibration-cache", "off"))

    def price(self, node: str) -> float:
        return self.cost if node in self.nodes else 1.0

    def busy_s(self, node: str, cpu_s: float, ran: float) -> float:
        """Seconds in which a node computed that had this CPU time. `ran`: the share of the time in which slow ones
        could run; for the rest of a step they are stopped."""
        return cpu_s / ran if node in self.nodes else cpu_s


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
        until_checked(urls.values(), [urls[name] for name in slow.nodes])
        yield
    figures["ran"] = duty.ran


def until_checked(urls: Collection[str], slow: Collection[str]) -> None:
    """Wait until every node, by URL, has compared its steps with its estimates; the slow ones from now on, so one that
    runs now does not count. Each check may begin when its schedule says, and CHECKED_S later it has ended. Raises
    StartTimeout, RestError."""
    before = {url: Checks.of(url) for url in slow}
    wanted = dict.fromkeys(urls, 1) | {url: one.done + (1 if one.wait_s else 2) for url, one in before.items()}
    deadline, counted = 0.0, -1
    while True:
        now, told = time.monotonic(), {url: Checks.of(url) for url in wanted}
        waits = [one.wait_s for url, one in told.items() if one.done < wanted[url]]
        if not waits:
            return
        if (done := sum(one.done for one in told.values())) != counted:
            deadline, counted = now + max(waits) + CHECKED_S, done
        if now > deadline:
            raise StartTimeout(f"a node has not measured its steps {CHECKED_S:g} s after it was due to")
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Checks:
    """Of an idle node (sched/idle_checks.py). `done`: those that came to an end; `wait_s`: until the next one may
    begin, 0 while one runs."""

    done: int
    wait_s: float

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises RestError."""
        told = rest.get(f"{url}/debug/state")["engine"]["idle_checks"]
        return cls(int(told["right"]) + int(told["wrong"]), float(told["wait_s"]))

"""CPU time of nodes by thread, and of the client, during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Average cores: 0.1 is a tenth of one. A node's loop is its first thread (HTTP, control, gossip); most of the time
    of its other threads is the model's."""

    seconds: float
    client: float
    loops: dict[str, float]
    others: dict[str, float]
    elsewhere: float  # other processes of the machine, which took this from the measurement


class Watch:
    """Measures from construction to `end`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """pids: process ids of the nodes, by name; empty for an external cluster."""
        self._pids = dict(pids)
        self._begun = time.monotonic(), time.process_time(), self._nodes(), busy_seconds()

    def end(self) -> CpuShares:
        began, client, nodes, busy = self._begun
        wall = time.monotonic() - began
        now, mine, all_ = self._nodes(), (time.process_time() - client) / wall, (busy_seconds() - busy) / wall
        first, rest = ({name: (now[name][i] - nodes[name][i]) / wall for name in nodes} for i in (0, 1))
        return CpuShares(wall, mine, first, rest, max(0.0, all_ - mine - sum(first.values()) - sum(rest.values())))

    def _nodes(self) -> dict[str, tuple[float, float]]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}


def busy_seconds() -> float:
    """Busy seconds of all cores since boot: everything except idle time and waiting for disks."""
    times = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return TICK_S * (sum(times) - times[3] - times[4])


def cpu_seconds(pid: int) -> tuple[float, float]:
    """(CPU seconds of the first thread, of all others, including those that have ended)"""
    process = Path(f"/proc/{pid}")
    whole, first = (_spent_s(of / "stat") for of in (process, process / "task" / str(pid)))
    return first, max(0.0, whole - first)


def _spent_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return TICK_S * (int(fields[11]) + int(fields[12]))

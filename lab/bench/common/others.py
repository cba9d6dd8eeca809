"""The share of the cores that others used since a moment: processes that this one did not start, and the hypervisor.

Other processes are those of /proc that do not descend from this one. A process's time includes that of its children
that ended, so short commands of a living shell count. Kernel threads do not count, because they also work for this
process. Nor do children that process 1 got since that moment, and what descends from them: they may be orphans of this
process, whose parents were killed. So a daemon that others start meanwhile is missed. Processes of other containers are
invisible. Steal is the time in which a virtual core was ready and the hypervisor ran another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
INIT = 1
KERNEL = "kthreadd"
"""The name of the parent of all kernel threads. A container does not show it."""
PARENT, TIMES, STARTED = 1, slice(11, 15), 19
"""Fields of /proc/PID/stat behind the name: the parent, user and system time of the process and its children, and when
it started."""
STEAL = 8  # word of the first line of /proc/stat

Key = tuple[int, int]
"""Process id, and when it started: ids are used again."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    parent: int
    cpu_s: float  # with its children that ended


class Others:
    """A moment, from which on the time of others is counted."""

    def __init__(self, proc: Path = PROC, pid: int | None = None, cores: int | None = None) -> None:
        """pid: that of this process. cores: of the machine."""
        self._proc, self._pid, self._cores = proc, pid or os.getpid(), cores or os.cpu_count() or 1
        self._begun = time.monotonic()
        self._before, self._stolen_s = others(proc, self._pid), stolen_s(proc)

    def share(self, elapsed_s: float | None = None) -> float:
        """CPU time of others since then, by that of all cores. elapsed_s: the seconds since then."""
        elapsed_s = elapsed_s or time.monotonic() - self._begun
        now = others(self._proc, self._pid, self._before)
        used_s = grown_s(self._before, now) + stolen_s(self._proc) - self._stolen_s
        return max(0.0, used_s / (self._cores * elapsed_s))


def others(proc: Path, pid: int, before: Container[Key] | None = None) -> dict[Key, Process]:
    """All processes except `pid`, its descendants and kernel threads; empty without /proc. With the others of a moment
    `before`, also without the children that process 1 got since, and their descendants."""
    found: dict[int, tuple[Key, Process]] = {}
    roots = {pid}
    for path in proc.glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text(errors="replace").partition("(")[2].rpartition(")")
            words = rest.split()
            parent, started = int(words[PARENT]), int(words[STARTED])
            times = sum(map(int, words[TIMES]))
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        one = int(path.parent.name)
        found[one] = (one, started), Process(parent, times / TICKS_PER_S)
        if name == KERNEL or (parent == INIT and before is not None and (one, started) not in before):
            roots.add(one)
    found.pop(INIT, None)

    def below(one: int) -> bool:
        while one in found and one not in roots:
            one = found[one][1].parent
        return one in roots

    return {key: process for one, (key, process) in found.items() if not below(one)}


def grown_s(before: Mapping[Key, Process], after: Mapping[Key, Process]) -> float:
    """CPU seconds that processes used between two moments."""
    living = {pid for pid, _ in after}
    used_s = sum(one.cpu_s - (before[key].cpu_s if key in before else 0.0) for key, one in after.items())
    # The parent of one that ended now has its whole time, also that of before.
    return used_s - sum(one.cpu_s for key, one in before.items() if key not in after and one.parent in living)


def stolen_s(proc: Path) -> float:
    """Seconds of all cores that the hypervisor gave to others; 0 if the kernel does not say it."""
    try:
        return int((proc / "stat").read_text().split("\n", 1)[0].split()[STEAL]) / TICKS_PER_S
    except (OSError, IndexError):
        return 0.0

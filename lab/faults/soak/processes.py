"""The holdings of a process, as the kernel counts them: memory, open files, threads, shared segments.

Also what it should not hold: segments of dead processes, and connections that the other side has closed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.faults.checks import own_bytes

SEGMENT = re.compile(r"/memfd:(?P<name>.*) of process (?P<owner>\d+) \(deleted\)$")
"""A shared region, as /proc shows it (net/transfer/common/memory.py)."""

CLOSE_WAIT = "08"
"""State of a TCP connection in /proc/net/tcp: the other side has closed it, this side has not."""

FILE = re.compile("/(?!memfd:)")
"""A path of the file system begins like this."""

GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds. `pss_bytes` counts a page that n processes map as 1/n page."""

    private_bytes: int
    pss_bytes: int
    files: int
    threads: int
    segments: int


def holding(pid: int) -> Holding | None:
    """None if the process has ended."""
    here = Path(f"/proc/{pid}")
    try:
        rollup = dict(line.split(":", 1) for line in (here / "smaps_rollup").read_text().splitlines()[1:])
        return Holding(
            own_bytes(pid),
            int(rollup["Pss"].split()[0]) << 10,
            _entries(here / "fd"),
            _entries(here / "task"),
            len(segments(pid)),
        )
    except (*GONE, KeyError):  # a process that has just ended has no memory left
        return None


def links(pid: int) -> list[str]:
    """What the descriptors of the process are: paths, 'socket:[INODE]', '/memfd:NAME (deleted)', ..."""
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(file.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def segments(pid: int) -> set[str]:
    """Paths of the shared regions that the process maps, or has a descriptor of."""
    mapped = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    paths = [fields[5] for fields in mapped if len(fields) == 6]
    return {path for path in (*paths, *links(pid)) if SEGMENT.match(path)}


def of_the_dead(found: Iterable[str], living: Iterable[int]) -> list[str]:
    """The segments whose owners are not among the living processes."""
    alive = set(living)
    return sorted(path for path in found if (one := SEGMENT.match(path)) and int(one["owner"]) not in alive)


def half_closed(pid: int) -> int:
    """TCP connections of the process that the other side has closed, and it has not."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == CLOSE_WAIT:
                inodes.add(f"socket:[{fields[9]}]")
    return sum(link in inodes for link in links(pid))


def kinds(found: Iterable[str]) -> Mapping[str, int]:
    """Number of descriptors of each kind, for the note of a node whose number has grown."""
    return Counter("file" if FILE.match(link) else link.split(":")[0] for link in found)


def _entries(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())

"""The holdings of a process, as the kernel counts them: memory, open files, threads, shared segments.

Also what it should not hold: segments of dead processes, and connections to them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import stat
import struct
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.faults.checks import own_bytes
from net.transfer.common.private_directory import PREFIX

SEGMENT = re.compile(r"/memfd:(?P<name>.*) of process (?P<owner>\d+) \(deleted\)$")
"""A shared region, as /proc shows it (net/transfer/common/memory.py)."""

ESTABLISHED, CLOSE_WAIT = "01", "08"
"""States of a TCP connection in /proc/net/tcp. CLOSE_WAIT: the other side has closed it, this side has not."""

CONNECTED = "03"
"""State of a Unix socket in /proc/net/unix, also after the other side has closed it."""

PIDFD_GETFD = 438
"""Number of the system call, which Python does not have; the same on all architectures."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall

FILE = re.compile("/(?!memfd:)")
"""A path of the file system begins like this."""

PEER = struct.Struct("iII")
"""pid, uid and gid of SO_PEERCRED."""

GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds. `pss_bytes` counts a page that n processes map as 1/n page. `unconnected`: open files
    other than connections and shared segments, whose number follows that of the peers."""

    private_bytes: int
    pss_bytes: int
    files: int
    unconnected: int
    threads: int
    segments: int


def connected() -> set[str]:
    """The connections of all processes of this network, as `links` shows them."""
    found = {f"socket:[{fields[9]}]" for fields in _tcp("self") if fields[3] == ESTABLISHED}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found | {f"socket:[{fields[6]}]" for fields in lines if fields[5] == CONNECTED}


def holding(pid: int, connections: Container[str] = ()) -> Holding | None:
    """None if the process has ended. `connections`: see `connected`."""
    here = Path(f"/proc/{pid}")
    try:
        rollup = dict(line.split(":", 1) for line in (here / "smaps_rollup").read_text().splitlines()[1:])
        return Holding(
            own_bytes(pid),
            int(rollup["Pss"].split()[0]) << 10,
            len(found := links(pid)),
            sum(link not in connections and not SEGMENT.match(link) for link in found),
            sum(1 for _ in (here / "task").iterdir()),
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


def directories(pid: int) -> list[str]:
    """Paths of its private directories, of which it holds the locks; none if it has ended."""
    try:
        return [link for link in links(pid) if Path(link).name.startswith(PREFIX) and Path(link).is_dir()]
    except GONE:
        return []


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
    inodes = {f"socket:[{fields[9]}]" for fields in _tcp(str(pid)) if fields[3] == CLOSE_WAIT}
    return sum(link in inodes for link in links(pid))


def unix_peers(pid: int) -> list[int]:
    """The processes at the other ends of its Unix sockets, also if they are dead. Raises OSError if this process may
    not look into that one."""
    found = []
    process = os.pidfd_open(pid)
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            copy = _syscall(PIDFD_GETFD, process, int(file.name), 0)
            if copy < 0 and (error := ctypes.get_errno()) != errno.EBADF:  # that is one closed meanwhile
                raise OSError(error, os.strerror(error))
            if copy >= 0:
                found.append(_peer(copy))
    finally:
        os.close(process)
    return [peer for peer in found if peer > 0]


def _peer(descriptor: int) -> int:
    """0 if it is no connected Unix socket. Closes it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return 0
    with socket.socket(fileno=descriptor) as one:
        if one.family != socket.AF_UNIX:
            return 0
        credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        return int(PEER.unpack(credentials)[0])


def _tcp(process: str) -> list[list[str]]:
    """The rows of the TCP connections of its network."""
    tables = [Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return [line.split() for table in tables for line in table.splitlines()[1:]]


def kinds(found: Iterable[str]) -> Mapping[str, int]:
    """Number of descriptors of each kind, for the note of a node whose number has grown."""
    return Counter("file" if FILE.match(link) else link.split(":")[0] for link in found)

"""fio on the file system of the SSD tier: the same operations on the disk as the tier, without the tier.

Every job does one blocking call per block, like the tier: same bytes per call, same number of threads, same syncs, and
the same way to the disk. Blocks are written in order into a file that has its full size on disk before the time begins,
and read at random, each once. The time includes the sync at the end of a write.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

INSTALL = "fio is not installed: apt-get install fio"
LOOPS = 16
"""Reads of each block in the page cache: fio tells milliseconds, and one read of all takes few."""


class FioError(Exception):
    """fio cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """`blocks` of `nbytes` each, in total. `cached`: through the page cache. `ahead`: writing to disk starts after this
    many blocks in the page cache; 0: when the kernel wants. `sync_each`: sync after each block, not only at the end.
    `resident`: the page cache has the blocks when the time begins, and they are read LOOPS times; otherwise it has none
    of them."""

    operation: str  # write or read
    blocks: int
    nbytes: int
    cached: bool = False
    threads: int = 1
    ahead: int = 0
    sync_each: bool = False
    resident: bool = False

    @property
    def loops(self) -> int:
        return LOOPS if self.resident else 1

    def flags(self, path: Path) -> list[str]:
        share = self.blocks // self.threads * self.nbytes
        flags: dict[str, object] = {
            "name": self.operation,
            "filename": path,
            "rw": "write" if self.operation == "write" else "randread",
            "ioengine": "psync",
            "fallocate": "posix",
            "bs": self.nbytes,
            "size": share,
            "numjobs": self.threads,
            "offset_increment": share,
            "direct": int(not self.cached),
            "invalidate": int(not self.resident),
            "pre_read": int(self.resident),
            "loops": self.loops,
        }
        if self.operation == "write":
            flags |= {"fdatasync": 1} if self.sync_each else {"end_fsync": 1}
            flags |= {"sync_file_range": f"write:{self.ahead}"} if self.ahead else {}
        return [f"--{name}={value}" for name, value in flags.items()] + ["--thread", "--group_reporting"]


def fio_speed(path: Path, job: Job) -> float:
    """GB/s of the job on the file, which a write makes if it does not exist. Raises FioError."""
    program = shutil.which("fio")
    if program is None:
        raise FioError(INSTALL)
    done = subprocess.run([program, "--output-format=json", *job.flags(path)], capture_output=True, check=False)
    if done.returncode:
        raise FioError(f"fio failed: {done.stderr.decode(errors='replace').strip()}")
    return moved(orjson.loads(done.stdout), job)


def moved(told: dict[str, Any], job: Job) -> float:
    """GB/s by fio's report. Raises FioError if it moved other bytes than the job's."""
    (group,) = told["jobs"]
    found = group[job.operation]
    wanted = job.blocks // job.threads * job.threads * job.nbytes * job.loops
    if found["io_bytes"] != wanted:
        raise FioError(f"fio moved {found['io_bytes']} bytes instead of {wanted}")
    if not found["runtime"]:
        raise FioError(f"fio moved {wanted} bytes in less than the millisecond that it can tell")
    return float(found["io_bytes"] / (found["runtime"] / 1e3) / 1e9)

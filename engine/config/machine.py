"""The facts about this machine from which `engine.config.resolve` resolves every 'auto'.

They are read from /proc and /sys. torch is imported only to look for a GPU, and only if a model will run here.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags for bfloat16 products in hardware (the last one is Arm's)."""


FILES, MOST_FILES = resource.RLIMIT_NOFILE, 1 << 20
NO_LIMIT = 1 << 62

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems on which what is written stays in memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that torch would use, and the number of visible GPUs; the others are assumed to be equal."""

    name: str
    total_bytes: int
    free_bytes: int
    bfloat16: bool
    count: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware as this process may use it: affinity and cgroup limits are already applied."""

    num_cpus: int
    free_bytes: int  # RAM that can be allocated without swapping
    bfloat16: bool  # the CPU multiplies bfloat16 natively
    gpu: Gpu | None = None
    total_bytes: int = NO_LIMIT  # RAM of the machine, at most the cgroup's limit
    disk_bytes: int = NO_LIMIT  # of the file system of --ssd-path
    max_files: int = NO_LIMIT  # open files that this process may have


def survey(
    look_for_gpu: bool,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    ssd_path: str | None = None,
) -> Machine:
    """Read the facts. `look_for_gpu` imports torch; tests pass other `proc` and `cgroup`."""
    quota = _cpu_quota(_read(cgroup / "cpu.max"))
    cpus = len(os.sched_getaffinity(0))
    return Machine(
        num_cpus=max(1, min(cpus, quota or cpus)),
        free_bytes=free_bytes(proc, cgroup),
        bfloat16=bool(BF16_FLAGS & set(_cpu_flags(_read(proc / "cpuinfo")))),
        gpu=_gpu() if look_for_gpu else None,
        total_bytes=_total_bytes(cgroup),
        disk_bytes=NO_LIMIT if ssd_path is None else _disk_bytes(Path(ssd_path).absolute()),
        max_files=max_files(),
    )


def total_bytes() -> int:
    """RAM of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def max_files() -> int:
    """Raises this process's limit of open files to at most MOST_FILES, and returns it: many systems allow 1,024 by
    default, and more on request."""
    soft, hard = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(FILES))
    wanted = max(soft, min(hard, MOST_FILES))
    resource.setrlimit(FILES, (wanted, resource.getrlimit(FILES)[1]))
    return wanted


def _disk_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize


def _total_bytes(cgroup: Path) -> int:
    limit = _read(cgroup / "memory.max").strip()
    return min(total_bytes(), int(limit)) if limit.isdigit() else total_bytes()


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """RAM that can be allocated now without swapping and within the cgroup's limit."""
    free = _meminfo_free(_read(proc / "meminfo"))
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used) + _cached(_read(cgroup / "memory.stat"))))
    return free


def _cached(memory_stat: str) -> int:
    """Bytes of files in a cgroup's memory: they count as used, and the kernel gives them back before it refuses
    memory. Memory in tmpfs is not among them."""
    found = dict(line.split() for line in memory_stat.splitlines())
    return sum(int(found.get(name, 0)) for name in ("active_file", "inactive_file"))


def _gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Gpu(torch.cuda.get_device_name(), total, free, torch.cuda.is_bf16_supported(), torch.cuda.device_count())


def _read(path: Path) -> str:
    """The file's text; empty if the kernel does not have the file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_flags(cpuinfo: str) -> Sequence[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.split()
    return ()


def _meminfo_free(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_quota(cpu_max: str) -> int | None:
    """cgroup v2 'quota period' in microseconds -> cores, rounded up; None: unlimited."""
    parts = cpu_max.split()
    if len(parts) != 2 or parts[0] == "max":
        return None
    return math.ceil(int(parts[0]) / int(parts[1]))


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `folder`, or its nearest parent that exists, lies on; empty if unknown."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        if words[2] == wanted and "-" in words:
            return words[words.index("-") + 1]
    return ""

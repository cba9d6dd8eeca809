"""Memory shared by processes of one host, and its page sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from engine.config.fits import named
from engine.config.machine import survey
from engine.doctor.finding import FAIL, OK, WARN, Finding, System, size

SMALL_SHM_BYTES = 64 << 20  # the default in containers


def memfd(system: System) -> list[Finding]:
    """Whether memfds work: arenas are memfds."""
    try:
        descriptor = os.memfd_create("mooncake-doctor")
    except (AttributeError, OSError) as error:
        return [Finding("memfd", FAIL, f"cannot be made: {error}", "a Linux kernel >= 3.17 without a filter on it")]
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.pwrite(descriptor, b"x", 0)
    except OSError as error:
        return [Finding("memfd", FAIL, f"cannot be written: {error}", "raise the memory limit of the container")]
    finally:
        os.close(descriptor)
    return [Finding("memfd", OK, "works: KV arenas are shared between processes of one host")]


def shm(system: System) -> list[Finding]:
    """torch and OpenMP may use /dev/shm; our arenas do not."""
    try:
        stat = os.statvfs(system.root / "dev/shm")
    except OSError:
        return [Finding("/dev/shm", WARN, "is not there", "mount -t tmpfs tmpfs /dev/shm")]
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{size(free)} of {size(total)} free; arenas are memfds and need none of it"
    if total <= SMALL_SHM_BYTES:
        return [Finding("/dev/shm", WARN, found, "docker run --shm-size=1g, for --tensor-parallel-size above 1")]
    return [Finding("/dev/shm", OK, found)]


def free_memory(system: System, wanted: Mapping[str, int] | None = None) -> list[Finding]:
    """Free memory, from which auto sizes --kv-cache-bytes and --dram-bytes. wanted: bytes by given
    flag."""
    machine = survey(False, system.root / "proc", system.root / "sys/fs/cgroup")
    found = f"{size(machine.free_bytes)} free"
    if wanted and (wanted_bytes := sum(wanted.values())) > machine.free_bytes:
        level = FAIL if wanted_bytes > machine.total_bytes else WARN
        remedy = f"give a smaller {' and '.join(wanted)}, or leave it on auto"
        found += f" of {size(machine.total_bytes)}, {named(wanted)} is {size(wanted_bytes)}"
        return [Finding("memory", level, found, remedy)]
    if machine.free_bytes < 1 << 30:
        return [Finding("memory", WARN, found, "give smaller --kv-cache-bytes and --dram-bytes, or more memory")]
    return [Finding("memory", OK, found)]


def huge_pages(system: System) -> list[Finding]:
    """Transparent huge pages for shared memory: they save page faults and, with RDMA, translations on the card."""
    chosen = re.search(r"\[(\w+)\]", system.read("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    reserved = re.search(r"HugePages_Total:\s+(\d+)", system.read("proc/meminfo"))
    found = f"shared memory: {chosen[1] if chosen else 'unknown'}; reserved: {reserved[1] if reserved else 'unknown'}"
    if chosen is None or chosen[1] in ("never", "deny"):
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return [Finding("huge pages", WARN, found, remedy)]
    return [Finding("huge pages", OK, found)]

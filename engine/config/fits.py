"""Whether the memory and the disk that the flags name exist on this machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.machine import Machine

MiB = 1 << 20


def memory_flags(config: Config) -> dict[str, int]:
    """Flag -> bytes of RAM that it takes on this node; without those on auto."""
    flags = {
        "--kv-cache-bytes": 0 if config.device == "cuda" else config.kv_cache_bytes,
        "--speculative-kv-bytes": 0 if config.device == "cuda" else config.speculative_kv_bytes,
        "--dram-bytes": config.dram_bytes,
    }
    return {flag: number for flag, number in flags.items() if number > 0}


def named(flags: Mapping[str, int]) -> str:
    """'--kv-cache-bytes 1024 + --dram-bytes 2048', largest first."""
    return " + ".join(f"{flag} {number}" for flag, number in sorted(flags.items(), key=lambda one: -one[1]))


def check_memory(config: Config, machine: Machine) -> None:
    """Raises UsageError if the arenas exceed the memory."""
    given = memory_flags(config)
    if (wanted := sum(given.values())) > machine.total_bytes:
        raise UsageError(
            f"{named(given)}: {wanted // MiB} MiB, and this machine (or its cgroup) has {machine.total_bytes // MiB} "
            "MiB; give less, or leave them on auto"
        )
    if machine.gpu is not None and config.device == "cuda":
        there = machine.gpu.total_bytes * config.tensor_parallel_size
        if config.kv_cache_bytes > there:
            raise UsageError(
                f"--kv-cache-bytes {config.kv_cache_bytes}: {config.kv_cache_bytes // MiB} MiB, and the GPUs of this "
                f"node have {there // MiB} MiB; give less, or leave it on auto"
            )


def beyond_free_memory(config: Config, machine: Machine) -> str | None:
    """A warning if the arenas exceed the memory that is free now: the kernel may end the node when it fills them."""
    given = memory_flags(config)
    if (wanted := sum(given.values())) <= machine.free_bytes:
        return None
    return f"{named(given)}: {wanted // MiB} MiB, and {machine.free_bytes // MiB} MiB are free now; give less"


def check_disk(config: Config, machine: Machine) -> None:
    """Raises UsageError for an SSD tier larger than its disk."""
    if config.ssd_path is not None and config.ssd_bytes > machine.disk_bytes:
        raise UsageError(
            f"--ssd-bytes {config.ssd_bytes}: {config.ssd_bytes // MiB} MiB, and the disk of --ssd-path "
            f"{config.ssd_path} has {machine.disk_bytes // MiB} MiB; give less"
        )

"""Compute: CPU features, compiler, OpenMP, GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from engine.config.machine import Gpu, survey
from engine.doctor.finding import OK, WARN, Finding, System

COMPILERS = ("g++", "c++", "clang++")
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "asimddp", "bf16")


def cpu(system: System) -> list[Finding]:
    """The cores that this process may use, and the instruction sets that the kernels use."""
    machine = survey(False, system.root / "proc", system.root / "sys/fs/cgroup")
    words = set(system.read("proc/cpuinfo").split())
    has = [name for name in FEATURES if name in words]
    found = f"{machine.num_cpus} cores; {', '.join(has) or 'no known vector extension'}"
    if not machine.bfloat16:
        return [Finding("CPU", WARN, f"{found}; no bfloat16 products", "none: --dtype auto takes float32 here")]
    return [Finding("CPU", OK, f"{found}; bfloat16 in hardware")]


def compiler(system: System, which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """The C++ compiler: --attention-backend cpu and RDMA are compiled at first use."""
    found = next((path for path in map(which, COMPILERS) if path), None)
    if found is None:
        remedy = "apt install g++; without it --attention-backend auto takes torch"
        return [Finding("C++ compiler", WARN, f"none of {', '.join(COMPILERS)} on PATH", remedy)]
    return [Finding("C++ compiler", OK, found)]


def openmp(system: System) -> list[Finding]:
    """OpenMP's settings: waiting threads that spin take cores from other nodes on this machine."""
    given = {name: value for name, value in system.environ.items() if name.startswith(("OMP_", "KMP_", "GOMP_"))}
    shown = ", ".join(f"{name}={value}" for name, value in sorted(given.items())) or "nothing set"
    if given.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        remedy = "export OMP_WAIT_POLICY=PASSIVE where several nodes share these cores (scripts/up does)"
        return [Finding("OpenMP", WARN, f"{shown}; waiting threads spin", remedy)]
    return [Finding("OpenMP", OK, f"{shown}; --num-threads sets the number of threads")]


def gpu(system: System, look: Callable[[], Gpu | None] | None = None) -> list[Finding]:
    """The GPUs that the driver knows, and whether torch can use them. Without a driver, torch is not imported."""
    cards = system.names("proc/driver/nvidia/gpus")
    if not cards:
        return [Finding("GPU", OK, "no NVIDIA driver: the model runs on the CPU")]
    seen = look() if look is not None else survey(True).gpu
    if seen is None:
        remedy = "pip install a CUDA build of torch (scripts/setup does with TORCH_INDEX_URL)"
        return [Finding("GPU", WARN, f"the driver has {len(cards)}, torch sees none", remedy)]
    return [Finding("GPU", OK, f"{len(cards)}: {seen.name}, {seen.total_bytes / 2**30:.0f} GiB")]

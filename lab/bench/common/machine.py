"""The machine of a benchmark: its CPU features, and whether it was idle.

Figures of two CPUs cannot be compared, so each result says which instructions its CPU has. A busy machine spoils every
figure, so each result also says how busy the machine was when the benchmark's process began, and how much of its cores
others used since then (others.py).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from lab.bench.common.others import Others

BUSY_LOAD = 0.5
"""A machine with a higher one-minute load average is not quiet."""

LOAD_BEFORE = os.getloadavg()[0]
"""Read when this module is imported, before the benchmark itself loads the machine."""

BUSY_SHARE = 0.05
"""A machine of whose cores others use a larger share during the run is not quiet."""

OTHERS = Others()
"""Since this module was imported, too."""

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "asimd", "asimddp")
"""Flags of /proc/cpuinfo that decide which kernels run, on x86 and ARM."""


def machine() -> dict[str, Any]:
    """JSON-ready. `cpu_features`: those of FEATURES that the CPU has. `others_share`: of the cores, from the start of
    this process until now. `quiet`: `load_before` <= BUSY_LOAD and `others_share` <= BUSY_SHARE."""
    name, features = cpu()
    share = OTHERS.share()
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpu": name,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "load_before": LOAD_BEFORE,
        "others_share": share,
        "quiet": LOAD_BEFORE <= BUSY_LOAD and share <= BUSY_SHARE,
    }


def cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """(name, features) of the first CPU; ("unknown", []) if the file cannot be read."""
    try:
        text = path.read_text().split("\n\n")[0]
    except OSError:
        return "unknown", []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", "unknown"), [name for name in FEATURES if name in flags]


def busy_note(found: dict[str, Any]) -> str:
    """The note in the result of a busy machine."""
    return (
        f"the machine is busy: load before this run {found['load_before']:.2f} (quiet is <= {BUSY_LOAD}), others use "
        f"{found['others_share']:.0%} of its cores (quiet is <= {BUSY_SHARE:.0%})"
    )

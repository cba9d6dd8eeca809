"""The folders of the SSD tier and of layers that are read."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from engine.config.machine import IN_MEMORY, file_system
from engine.doctor.finding import FAIL, OK, WARN, Finding, System, size


def lmdb_path(system: System, ssd_path: str | None, ssd_bytes: int) -> list[Finding]:
    """--ssd-path: the LMDB module, a writable directory (or its nearest existing parent), room for --ssd-bytes."""
    if importlib.util.find_spec("lmdb") is None:
        return [Finding("LMDB", FAIL if ssd_path else WARN, "the lmdb module is not installed", "pip install lmdb")]
    if ssd_path is None:
        return [Finding("LMDB", OK, "installed; no --ssd-path is given, so there is no SSD tier")]
    place = Path(ssd_path).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return [Finding("LMDB", FAIL, f"{place} is not a directory", "give another --ssd-path")]
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return [Finding("LMDB", FAIL, f"cannot write to {place}: {error.strerror}", "chown it, or another --ssd-path")]
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    found = f"{place} is writable, {size(free)} free"
    has = sum(file.stat().st_blocks * 512 for file in Path(ssd_path).glob("*") if file.is_file())
    if free + has < ssd_bytes:
        return [Finding("LMDB", FAIL, found, f"--ssd-bytes {ssd_bytes} does not fit: give less, or make room")]
    return [Finding("LMDB", OK, found)]


def offload_path(system: System, offload: str, folder: str | None) -> list[Finding]:
    """--offload-path: a disk, not memory, and one that is read past the page cache. Nothing without --offload auto."""
    if offload == "none":
        return []
    if folder is None:
        return [Finding("offload", OK, "layers that do not fit into memory go to the folder of --weight-cache")]
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    kind = file_system(place, system.root / "proc/self/mountinfo")
    if kind in IN_MEMORY:
        return [Finding("offload", FAIL, f"{place} lies in memory ({kind})", "give an --offload-path on a disk")]
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file_name = Path(file.name)
            try:
                os.close(os.open(file_name, os.O_RDONLY | os.O_DIRECT))
            except OSError:
                remedy = "give an --offload-path on a file system with O_DIRECT"
                return [Finding("offload", WARN, f"{place} ({kind}) is read through the page cache", remedy)]
    except OSError as error:
        remedy = "chown it, or another --offload-path"
        return [Finding("offload", FAIL, f"cannot write to {place}: {error.strerror}", remedy)]
    return [Finding("offload", OK, f"{place} ({kind}) is writable, {size(shutil.disk_usage(place).free)} free")]

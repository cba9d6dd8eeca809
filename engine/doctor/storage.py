"""The directory of the SSD tier."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

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

"""Claim: one process's exclusive hold on the directory of an SSD tier, with the state that the previous owner left.

The file `owner` is locked for the life of the process, so the kernel releases the claim even after kill -9. The file
records the machine's boot in which the tier was last open, and whether it was closed cleanly. Without syncs, a dirty
tier survives the death of its process (the pages are in the kernel), but not that of the machine. A damaged tree can
kill the process that reads it, so attempts to open are counted.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ATTEMPTS_MAX = 1  # once this many processes died while opening a tier, it is considered poisoned
RECORD_BYTES = 192  # fixed, so that one write replaces the record


class SsdError(Exception):
    """The SSD tier cannot be used as asked; the message names the remedy."""


def boot_id() -> str:
    """An id that changes when the machine restarts; 'unknown' if the kernel has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


class Claim:
    """Exclusive right to `directory`, which is created if necessary. Raises SsdError if another tier, in this or
    another process, has it, or if it cannot be written."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SsdError(f"cannot write to {directory} ({error.strerror}): give another --ssd-path") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._read().get("pid", "unknown")
            os.close(self._fd)
            raise SsdError(f"process {owner} uses {directory}: give every node its own --ssd-path") from error
        record = self._read()
        self.known = bool(record)  # whether there was a tier before
        self.trusted = bool(record.get("clean")) or record.get("boot") == boot_id()  # whether its pages are intact
        attempts = record.get("attempts")
        self.attempts = attempts if isinstance(attempts, int) else 0  # unfinished attempts to open it
        self.deadly = self.attempts >= ATTEMPTS_MAX

    def begin(self) -> None:
        """Record that the tier is dirty and being opened. Raises SsdError."""
        self._write(clean=False, attempts=0 if self.deadly else self.attempts + 1)

    def opened(self) -> None:
        """Record that the tier was read successfully. Raises SsdError."""
        self._write(clean=False, attempts=0)

    def end(self) -> None:
        """Record that all data is on disk. Raises SsdError."""
        self._write(clean=True, attempts=0)

    def close(self) -> None:
        """Release the directory in the last recorded state."""
        os.close(self._fd)

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(os.pread(self._fd, RECORD_BYTES, 0))
        except ValueError:  # empty: never begun
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, *, clean: bool, attempts: int) -> None:
        record = json.dumps({"pid": os.getpid(), "boot": boot_id(), "clean": clean, "attempts": attempts})
        try:
            os.pwrite(self._fd, record.ljust(RECORD_BYTES).encode(), 0)
            os.fsync(self._fd)
        except OSError as error:
            raise SsdError(f"cannot write to the --ssd-path ({error.strerror}): give one with room") from error

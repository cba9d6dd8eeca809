"""Claim: one process's hold on the directory of an SSD tier, and what it knows of the owner before.

The file `owner` is locked for the life of the process, so the kernel gives the claim back also after kill -9. It says
in which boot of the machine the tier was last open and whether it was closed cleanly. Without syncs a dirty tier
survives the death of its process (the pages are the kernel's), but not that of the machine. A damaged tree can kill
whoever reads it, so attempts to open are counted.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ATTEMPTS_MAX = 1  # processes that died while they opened a tier: the next one takes it for poisoned
RECORD_BYTES = 192  # fixed, so that one write replaces the record


class SsdError(Exception):
    """The SSD tier cannot be used as asked; the message names the remedy."""


def boot_id() -> str:
    """Changes when the machine restarts; 'unknown' where the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


class Claim:
    """Exclusive right to `directory`, which is made if need be. Raises SsdError when another tier, of this process or
    another, has it, or when it cannot be written."""

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
        self.known = bool(record)  # a tier was here before
        self.trusted = bool(record.get("clean")) or record.get("boot") == boot_id()  # and its pages are whole
        attempts = record.get("attempts")
        self.attempts = attempts if isinstance(attempts, int) else 0  # to open it that did not come to an end
        self.deadly = self.attempts >= ATTEMPTS_MAX

    def begin(self) -> None:
        """From now on the tier is dirty, and being opened. Raises SsdError."""
        self._write(clean=False, attempts=0 if self.deadly else self.attempts + 1)

    def opened(self) -> None:
        """What is there could be read. Raises SsdError."""
        self._write(clean=False, attempts=0)

    def end(self) -> None:
        """Everything is on disk. Raises SsdError."""
        self._write(clean=True, attempts=0)

    def close(self) -> None:
        """Give the directory back, in the state last written."""
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

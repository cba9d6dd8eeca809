"""A file to which a serving node appends lines (--record-trace, --record-steps). If a write fails, for example on a
full disk, only the recording ends: the file keeps whole lines, and an error is logged."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("mooncake.node")


class LineFile:
    """Appends to `path`. `flag`: the flag that named it, for the error line. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path, flag: str) -> None:
        self._name = f"{flag} {path}"
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @property
    def is_open(self) -> bool:
        """False after a failed write and after `close`."""
        return self._file is not None

    def add(self, lines: bytes) -> None:
        """Append whole lines; does nothing after a failure."""
        if self._file is None:
            return
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._file, memoryview(lines)[written:])
        except OSError as error:
            log.error("%s: %s; the recording ends here, the node continues to serve", self._name, error.strerror)
            self._cut(written)
            self.close()

    def _cut(self, written: int) -> None:
        """Remove the written part of the last lines."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
        except OSError as error:  # a pipe, or a device
            log.info("%s: its last line may be incomplete: %s", self._name, error.strerror)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

"""The answers of one batch on disk, a line each, in the order in which they ended.

A line is written by one call behind the others. A process that is killed while it writes leaves at most one torn line
at the end, which the next one cuts off; its request runs again. So every request has at most one whole line. Nothing
here waits for the disk: a batch has ended when its output files are on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class Journal:
    """Open for one batch while it runs."""

    def __init__(self, path: Path) -> None:
        """Cuts off a torn last line. Raises OSError."""
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, _whole_bytes(path))

    def add(self, number: int, ok: bool, line: dict[str, Any]) -> None:
        """The answer of line `number`; ok: it belongs to the output file. Raises OSError, and then adds nothing."""
        entry = orjson.dumps({"number": number, "ok": ok, "line": line}) + b"\n"
        before = os.fstat(self._file).st_size
        if os.write(self._file, entry) != len(entry):
            os.ftruncate(self._file, before)
            raise OSError(f"{self._path}: the disk is full")

    def entries(self) -> Iterator[tuple[int, bool, dict[str, Any]]]:
        """(number, ok, line) of every answer so far."""
        with self._path.open("rb") as lines:
            for raw in lines:
                entry = orjson.loads(raw)
                yield entry["number"], entry["ok"], entry["line"]

    def close(self) -> None:
        os.close(self._file)


def _whole_bytes(path: Path) -> int:
    """The length of the part of the file that ends with a line break."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as data:
        while end < size:
            data.seek(max(0, size - (1 << 20)))
            begin = data.tell()
            found = data.read(size - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            size = begin
    return 0

"""The weights of layers in a file, in the form in which the kernels read them.

The file loses its name as soon as it is open, so it goes with the process, however that ends. Reads pass by the page
cache (O_DIRECT): the weights are in no memory but the buffers, and every pass reads the disk. Where a file system has
no direct access, the kernel is told after each read that its pages will not be needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from cache.ssd.direct import DirectFile, aligned

HELPERS = 4
"""Reads under way at once: one alone does not keep an SSD busy."""

PIECE_BYTES = 4 << 20
"""Of one read, and of one write: more would only need larger buffers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes that are read together. Each of its parts begins at a page."""

    begin: int
    nbytes: int  # whole pages
    offsets: tuple[int, ...]  # of its parts, from `begin`


class Spool:
    """A file without a name in `folder`. One thread appends; then threads read. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=folder, prefix="layers-")
        try:
            self._file = DirectFile(Path(name), writable=True)
        finally:
            os.close(fd)
            Path(name).unlink()
        self.nbytes = 0
        self._helpers = ThreadPoolExecutor(HELPERS, "weights-read")

    @property
    def direct(self) -> bool:
        """Whether reads pass by the page cache."""
        return self._file.direct_fd >= 0

    def append(self, parts: Sequence[memoryview]) -> Extent:
        """Write `parts`, bytes each. Raises OSError if the disk is full."""
        begin, offsets = self.nbytes, []
        for part in parts:
            offsets.append(self.nbytes - begin)
            for at in range(0, len(part), PIECE_BYTES):
                self._file.write(self.nbytes + at, part[at : at + PIECE_BYTES])
            self.nbytes += aligned(len(part))
        os.ftruncate(self._file.fd, self.nbytes)  # a last page that is not full was written only as far as it goes
        return Extent(begin, self.nbytes - begin, tuple(offsets))

    def settle(self) -> None:
        """All is written: what the page cache has of it can go."""
        os.fsync(self._file.fd)
        self._drop(0, 0)

    def read(self, extent: Extent, into: memoryview) -> None:
        """Fill the beginning of `into`, memory from a page on, with the extent. Raises OSError, when no part of it is
        being read any more: the memory may be used again."""

        def one(at: int) -> None:
            count = min(PIECE_BYTES, extent.nbytes - at)
            self._file.read(extent.begin + at, count, into[at : at + count])

        pieces = [self._helpers.submit(one, at) for at in range(0, extent.nbytes, PIECE_BYTES)]
        wait(pieces)
        for piece in pieces:
            piece.result()
        if not self.direct:
            self._drop(extent.begin, extent.nbytes)

    def _drop(self, begin: int, nbytes: int) -> None:
        """From the page cache; 0 bytes: all behind `begin`."""
        os.posix_fadvise(self._file.fd, begin, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """No read is under way."""
        self._helpers.shutdown(wait=True)
        self._file.close()

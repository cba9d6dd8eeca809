"""Reads and writes past the page cache.

Memory, offset and length of an O_DIRECT transfer must be multiples of a page. Blocks with aligned memory are
transferred directly between their slot and the disk; others are copied once through the thread's aligned buffer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from cache.arena import Buffer

PAGE = mmap.PAGESIZE
SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = ctypes.CDLL(
    None
).sync_file_range  # Linux; an unsupported file system returns an error and does nothing
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of a page."""
    return -(-nbytes // PAGE) * PAGE


def address_of(memory: Buffer) -> int:
    """The address of `memory` in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class DirectFile:
    """`path`, opened for reading, or for reading and writing. Thread-safe. Raises OSError."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        mode = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        self.fd = os.open(path, mode)
        try:
            self.direct_fd = os.open(path, mode | os.O_DIRECT)
        except OSError:  # a file system without direct access, like some versions of tmpfs
            self.direct_fd = -1
        self._buffers = threading.local()

    def read(self, offset: int, nbytes: int, into: memoryview, *, cached: bool = False) -> None:
        """Fill the first `nbytes` of `into`; the bytes after them may be overwritten too. `cached`: read through the
        page cache."""
        if cached or self.direct_fd < 0:
            self._read(self.fd, into[:nbytes], offset)
            return
        start = offset - offset % PAGE
        size = aligned(offset + nbytes) - start
        if start == offset and size <= len(into) and address_of(into) % PAGE == 0:
            self._read(self.direct_fd, into[:size], start)
            return
        buffer = self._buffer(size)
        self._read(self.direct_fd, buffer, start)
        first = offset - start
        np.frombuffer(into, np.uint8)[:nbytes] = np.frombuffer(buffer, np.uint8)[first : first + nbytes]

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`, the start of a page. The rest of the last page is undefined afterwards."""
        if self.direct_fd < 0:
            self._write(self.fd, memoryview(data), offset)
            return
        size = aligned(len(data))
        if size == len(data) and address_of(data) % PAGE == 0:
            self._write(self.direct_fd, memoryview(data), offset)
            return
        buffer = self._buffer(size)
        np.frombuffer(buffer, np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._write(self.direct_fd, buffer, offset)

    def begin_writing(self) -> None:
        """Start writing dirty pages of the page cache or of a mapping to disk, without waiting."""
        _sync_file_range(self.fd, 0, 0, SYNC_FILE_RANGE_WRITE)

    def _read(self, fd: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends at {offset + done}")
            done += count

    def _write(self, fd: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def _buffer(self, nbytes: int) -> memoryview:
        """Page-aligned memory of this thread."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers.memory = memoryview(mmap.mmap(-1, nbytes))
        return buffer[:nbytes]

    def close(self) -> None:
        """Idempotent. No other thread may use the file during or after the call."""
        for fd in (self.fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.direct_fd = -1

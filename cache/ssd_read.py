"""Reading values of an LMDB file with read calls instead of through its map.

A bad sector under a mapped page kills the process with SIGBUS; a read call says EIO, which is a miss. And a direct read
of a whole value is faster than page faults with read-ahead. So LMDB says where in the map a value lies, and its
bytes are read from that offset of the file: from the page cache where all of it is there (mincore), else past it
(O_DIRECT, through an aligned buffer). The kernel writes dirty pages of a range back before it reads it directly.

The pages of the trees, some 0.1 % of the file, are still read through the map by LMDB itself, and pages that are used
again are written through it: an I/O error there remains fatal, as it is for every program on LMDB. A node that dies of
it is a lost replica, and its file is started empty when it cannot be read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from cache.claim import SsdError

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class ValueReader:
    """Of the values in `path`, which is mapped into this process. Any thread may read."""

    def __init__(self, path: Path) -> None:
        self._base = map_address(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without direct reads, like tmpfs
            self._direct_fd = -1
        self._buffers = threading.local()

    def read(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into` with what `stored`, a view of the map, shows. Raises OSError."""
        offset = np.frombuffer(stored, np.uint8).ctypes.data - self._base
        if self._direct_fd < 0 or resident(self._base + offset, len(into)):
            self._read_all(self._fd, into, offset)
            return
        start = offset - offset % PAGE
        end = -(-(offset + len(into)) // PAGE) * PAGE
        buffer = self._buffer(end - start)
        self._read_all(self._direct_fd, buffer, start)
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(buffer[offset - start :][: len(into)], np.uint8)

    def _read_all(self, fd: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends at {offset + done}")
            done += count

    def _buffer(self, nbytes: int) -> memoryview:
        """Page-aligned memory of this thread."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers.memory = memoryview(mmap.mmap(-1, nbytes))
        return buffer[:nbytes]

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)


def resident(address: int, nbytes: int) -> bool:
    """Whether all pages of this part of a map are in memory. (A read with RWF_NOWAIT would say so, too, and start to
    read ahead what the direct read then reads again.)"""
    start = address - address % PAGE
    pages = (ctypes.c_ubyte * -(-(address + nbytes - start) // PAGE))()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), pages):
        return False
    return all(page & 1 for page in pages)


def map_address(path: Path) -> int:
    """Where this process has the start of the file mapped. Raises SsdError when the kernel does not say."""
    inode, name = path.stat().st_ino, str(path.resolve())  # the device's number is another on overlay file systems
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise SsdError(f"--ssd-path needs /proc/self/maps ({error.strerror})") from error
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and int(words[4]) == inode and words[5] == name and int(words[2], 16) == 0:
            return int(words[0].partition("-")[0], 16)
    raise SsdError(f"{path} is not mapped here: give another --ssd-path")

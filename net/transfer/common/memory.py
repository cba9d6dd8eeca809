"""Region: one named span of memory that transfers read and write.

A shared region is a memfd mapped into this process. In the shared-memory transport, another process of the host gets
its file descriptor and maps the same pages. The size is sealed, so the owner cannot kill a peer by truncating the file
under its mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from typing import Self

HUGE_BYTES = 2 << 20
MAP_FIXED = 0x10  # the mmap module has no name for it
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; the mmap module has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p


class Region:
    """Writable memory with a name, the unit of registration with the transfer engine.

    Make one with `shared`, `private` or `attach`; it is a context manager.
    """

    def __init__(self, name: str, mapping: mmap.mmap, offset: int, nbytes: int, memfd: int | None) -> None:
        """The region is the `nbytes` of `mapping` from `offset` on."""
        self.name = name
        self.nbytes = nbytes
        self.memory = memoryview(mapping)[offset : offset + nbytes]  # format B, writable
        self.memfd = memfd  # None: cannot be shared with another process
        self.address = _address(mapping) + offset  # for ctypes.memmove
        self.place: str | None = None  # set by the owner if it belongs to a GPU: 'cuda:0@0000:3b:00.0'
        self.closed = False
        self._mapping = mapping

    @classmethod
    def shared(cls, name: str, nbytes: int) -> Region:
        """New zeroed memory in a memfd. /proc shows its name and its owner in every process that maps it. Raises
        ValueError unless nbytes > 0, OSError if the kernel refuses it."""
        _check_size(name, nbytes)
        shown = f"{name} of process {os.getpid()}"
        memfd = os.memfd_create(shown, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, nbytes)
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(name, *_mapped(memfd, nbytes), nbytes, memfd)
        except BaseException:
            os.close(memfd)
            raise

    @classmethod
    def private(cls, name: str, nbytes: int) -> Region:
        """New zeroed memory that only this process maps: peers reach it only over TCP."""
        _check_size(name, nbytes)
        return cls(name, mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0, nbytes, None)

    @classmethod
    def attach(cls, name: str, memfd: int, nbytes: int) -> Region:
        """Map another process's region. Takes ownership of `memfd`, also if this raises. Raises ValueError if the file
        is smaller than `nbytes` or may still shrink, OSError if it is not a memfd."""
        try:
            _check_size(name, nbytes)
            if os.fstat(memfd).st_size < nbytes:
                raise ValueError(f"region {name!r}: its file has fewer than {nbytes} bytes")
            if not fcntl.fcntl(memfd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"region {name!r}: its file may shrink; create it with Region.shared")
            return cls(name, *_mapped(memfd, nbytes), nbytes, memfd)
        except BaseException:
            os.close(memfd)
            raise

    def populate(self, offset: int, nbytes: int) -> None:
        """Map these pages into this process in one system call: a page fault at each first write takes eight times as
        long. The content does not change. A kernel before 5.14 does nothing."""
        start = offset - offset % mmap.PAGESIZE
        _madvise(self.address + start, offset + nbytes - start, POPULATE_READ)

    def close(self) -> None:
        """Free the memory. If views of `memory` are alive elsewhere (a copy in flight, a torch tensor), the pages stay
        mapped until the last view is gone, but the region cannot be used. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with suppress(BufferError):  # views are alive: the last of them frees the mapping
            self.memory.release()
            self._mapping.close()
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Region({self.name!r}, {self.nbytes} bytes, {'private' if self.memfd is None else 'shared'})"


def _mapped(memfd: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """A mapping and the offset in it where the file begins: an address aligned for huge pages, which Linux does not
    choose on its own. The mmap object also owns the unused pages around the file. Raises OSError."""
    if nbytes < HUGE_BYTES:
        return mmap.mmap(memfd, nbytes), 0
    around = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -_address(around) % HUGE_BYTES
    where = _address(around) + offset
    if _mmap(where, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, memfd, 0) != where:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    _madvise(where, nbytes, mmap.MADV_HUGEPAGE)  # has an effect if Linux allows it for memfds (doctor reports this)
    return around, offset


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _check_size(name: str, nbytes: int) -> None:
    if nbytes <= 0:
        raise ValueError(f"region {name!r} needs at least one byte, got {nbytes}")

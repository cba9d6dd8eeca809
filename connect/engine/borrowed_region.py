"""BorrowedRegion: memory of the calling program as a region of our transfers."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from net.transfer.common.memory import Region

WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int], ctypes.py_object


class BorrowedRegion(Region):
    """The program keeps it mapped until `close`."""

    def __init__(self, name: str, address: int, nbytes: int) -> None:
        self.name = name
        self.address = address
        self.nbytes = nbytes
        self.memory: memoryview = _view(address, nbytes, WRITABLE)
        self.memfd = None
        self.place = None
        self.closed = False

    def close(self) -> None:
        """The memory stays the program's. Idempotent."""
        self.closed = True
        with suppress(BufferError):  # a transfer that ends has a view of it
            self.memory.release()

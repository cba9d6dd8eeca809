"""Memory of the calling program: raw addresses and buffers, as the pieces of one value."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import memmove
from typing import Any

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int], ctypes.py_object


def view(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address of this process; they belong to somebody who keeps them."""
    made: memoryview = _view(address, nbytes, WRITABLE)
    return made


def blank_bytes(nbytes: int) -> bytes:
    """Bytes of undefined content that nobody else has: fill them before they are passed on. At least 2: Python shares
    shorter ones."""
    if nbytes < 2:
        raise ValueError(f"{nbytes} bytes are shared objects")
    made: bytes = _new_bytes(None, nbytes)
    return made


def address_of(buffer: Any) -> tuple[int, int, object]:
    """(address, bytes, the object that keeps the memory) of a contiguous buffer. Raises TypeError for another object,
    BufferError for one that is not contiguous."""
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0, len(buffer), buffer
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("the buffer is not contiguous")
    if view.readonly or not view.nbytes:
        return address_of(view.tobytes())
    flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    return ctypes.addressof(ctypes.c_char.from_buffer(flat)), flat.nbytes, flat


class Pieces:
    """The memory of one value: (address, bytes) of each piece in order. `owners` keep it alive."""

    def __init__(self, pieces: Sequence[tuple[int, int]], owners: object = None) -> None:
        self.pieces = pieces
        self.nbytes = sum(nbytes for _, nbytes in pieces)
        self._owners = owners

    @classmethod
    def of(cls, *buffers: Any) -> Pieces:
        """The memory of buffers. Raises TypeError, BufferError."""
        rows = [address_of(buffer) for buffer in buffers]
        return cls([(address, nbytes) for address, nbytes, _ in rows], [owner for _, _, owner in rows])

    def views(self, nbytes: int | None = None) -> list[memoryview]:
        """The first `nbytes` of the value, or all; valid while the pieces are."""
        total = self.nbytes if nbytes is None else nbytes
        return [view(address, length) for address, length in self._within(0, total) if length]

    def copy_to(self, address: int, start: int, nbytes: int) -> None:
        """Copy the bytes [start, start + nbytes) of the value to `address`."""
        for here, length in self._within(start, nbytes):
            memmove(address, here, length)
            address += length

    def copy_from(self, address: int, start: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` to the bytes of the value from `start` on."""
        for here, length in self._within(start, nbytes):
            memmove(here, address, length)
            address += length

    def _within(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of the parts of the pieces that lie in that range of the value."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} of a value of {self.nbytes}")
        for address, length in self.pieces:
            if not nbytes:
                return
            if start < length:
                here = min(nbytes, length - start)
                yield address + start, here
                nbytes -= here
                start = 0
            else:
                start -= length

"""BorrowedRegion: memory of the calling program as a region of our transfers."""

from __future__ import annotations

from contextlib import suppress

from connect.common.raw_memory import view
from net.transfer.common.memory import Region


class BorrowedRegion(Region):
    """The program keeps it mapped until `close`."""

    def __init__(self, name: str, address: int, nbytes: int) -> None:
        self.name = name
        self.address = address
        self.nbytes = nbytes
        self.memory = view(address, nbytes)
        self.memfd = None
        self.place = None
        self.closed = False

    def close(self) -> None:
        """The memory stays the program's. Idempotent."""
        self.closed = True
        with suppress(BufferError):  # a transfer that ends has a view of it
            self.memory.release()

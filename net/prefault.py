"""Prefault: an arena gets its pages before somebody waits for them.

The first write to a page makes Linux find one and clear it. While the arenas of a node are new, that is a third of the
CPU time of a prompt of the embedded model (KV written, and copied to the pool), so a thread goes ahead of it while
there is nothing else to do. Contents are not touched: it may run while the memory is in use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Callable, Sequence

from net.memory import Region

log = logging.getLogger("mooncake.net")

STRIDE_BYTES = 4 << 20  # per system call: some milliseconds of one core and of the process's memory map
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module has no name for it
LOOK_AGAIN_S = 0.05


class Prefault:
    """Populates regions in the order given, each from its start, as allocators use them."""

    def __init__(self, regions: Sequence[Region], room: Callable[[], int], busy: Callable[[], bool]) -> None:
        """room(): bytes of memory that may still be taken; below one stride the rest gets its pages when it is used.
        busy(): somebody wants the cores now. Both are called from the thread."""
        self.populated = 0  # bytes
        self._regions = regions
        self._room = room
        self._busy = busy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Until all is populated or given up."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Before a region is closed: returns when the thread has ended. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for region in self._regions:
            for offset in range(0, region.nbytes, STRIDE_BYTES):
                while self._busy() and not self._stop.wait(LOOK_AGAIN_S):
                    pass
                if self._stop.is_set():
                    return
                if self._room() < STRIDE_BYTES:
                    log.info("prefault: memory is short, stopped after %d MiB of the arenas", self.populated >> 20)
                    return
                count = min(STRIDE_BYTES, region.nbytes - offset)
                address = ctypes.c_void_p(region.address + offset)
                if libc.madvise(address, ctypes.c_size_t(count), POPULATE_WRITE):
                    reason = errno.errorcode.get(ctypes.get_errno(), "unknown")
                    log.info("prefault: not here, madvise says %s; pages come when they are used", reason)
                    return
                self.populated += count

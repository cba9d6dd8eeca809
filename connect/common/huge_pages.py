"""Huge pages under memory of the calling program, for copies between processes.

The kernel looks up each page of the other process. With pages of 4 KiB, this takes about as long as the copy itself. So
a thread asks the kernel, range after range, to move the memory to huge pages (Linux 6.1; an older kernel refuses, and
the memory stays as it is). Its content and its addresses stay the same, and the program may use it meanwhile; a page
fault of the program may wait for the move of one huge page.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

from net.transfer.common.memory import HUGE_BYTES

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
STEP_BYTES = 8 << 20  # of one call: `forget` waits for no longer
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HugePages:
    """Any thread may call. Its own thread runs only while there is work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moving = threading.Lock()  # held by the thread for one step
        self._ranges: deque[tuple[int, int, int]] = deque()  # address of the memory; start and end, aligned
        self._thread: threading.Thread | None = None

    def ask(self, address: int, nbytes: int) -> None:
        """Memory that the program has filled moves soon; memory that it fills later begins in huge pages."""
        start = address + -address % HUGE_BYTES
        end = address + nbytes - (address + nbytes) % HUGE_BYTES
        if start >= end or _madvise(start, end - start, MADV_HUGEPAGE):
            return
        with self._lock:
            self._ranges.append((address, start, end))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mooncake-huge-pages", daemon=True)
                self._thread.start()

    def forget(self, address: int) -> None:
        """When this returns, the program may unmap the memory."""
        with self._lock:
            self._ranges = deque(one for one in self._ranges if one[0] != address)
        with self._moving:
            pass

    def close(self) -> None:
        """Begin no further step. Idempotent."""
        with self._lock:
            self._ranges.clear()

    def _run(self) -> None:
        while True:
            with self._moving:
                with self._lock:
                    if not self._ranges:
                        self._thread = None
                        return
                    address, start, end = self._ranges.popleft()
                    step = min(end - start, STEP_BYTES)
                    if start + step < end:
                        self._ranges.appendleft((address, start + step, end))
                _madvise(start, step, MADV_COLLAPSE)  # refused: it stays as it is

"""How late an event loop runs: the loop reads a kernel timer that fires every 0.5 ms."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

PERIOD_S = 0.0005
TFD_NONBLOCK = os.O_NONBLOCK


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Watch:
    """Starts at construction, on the running loop. Uses a timerfd, because libuv's own timers have a resolution of 1
    ms."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.timerfd_create(time.CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        period = _Timespec(0, int(PERIOD_S * 1e9))
        libc.timerfd_settime(self._fd, 0, ctypes.byref(_Timer(period, period)), None)
        self._due = time.monotonic() + PERIOD_S
        self._late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fired)

    def _fired(self) -> None:
        """The oldest unread expiration shows how long the loop was blocked."""
        late = time.monotonic() - self._due
        expirations = int.from_bytes(os.read(self._fd, 8), "little")
        self._due += expirations * PERIOD_S
        self._late.append(max(0.0, late))

    def stop(self) -> dict[str, float]:
        """Milliseconds by which the loop was late, and the number of samples."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        rank = sorted(self._late)
        at = {name: 1e3 * rank[int(share * (len(rank) - 1))] for name, share in (("p99_ms", 0.99), ("p999_ms", 0.999))}
        return {"max_ms": 1e3 * rank[-1], **at, "looks": len(rank)}

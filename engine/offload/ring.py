"""A ring of buffers that a thread fills in a fixed order, again and again, ahead of the one who uses them.

The order is that of the layers, so after the last one the thread begins with the first ones of the next pass: they are
there when it begins. It stops when all buffers are filled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

B = TypeVar("B")

RECENT = 16
"""Reads over which the rate is averaged."""


class Ring(Generic[B]):
    """`B`: a buffer. One thread uses it."""

    def __init__(
        self, fill: Callable[[int, B], int], order: Sequence[int], buffers: Sequence[B], read_bytes: float, rate: float
    ) -> None:
        """fill(number, buffer): read what has this number, and return its bytes; it may raise any exception, which goes
        to the one who wants this number. `order`: the numbers, each once. `read_bytes`, `rate`: bytes and bytes/s of a
        read, as measured before."""
        self._fill, self._order, self._buffers = fill, list(order), buffers
        self._free: SimpleQueue[int | None] = SimpleQueue()
        self._filled: SimpleQueue[tuple[int, int, Exception | None]] = SimpleQueue()
        for place in range(len(buffers)):
            self._free.put(place)
        self.nbytes = 0  # read so far
        self._recent = read_bytes, read_bytes / rate  # bytes and seconds of a read, averaged over the last ones
        self.waited_s = 0.0  # of the user, for a buffer to be filled
        self.skipped = 0  # buffers that were filled in vain, because a pass had ended early
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def rate(self) -> float:
        """Bytes/s of the last reads, without the waits for a free buffer."""
        nbytes, seconds = self._recent
        return nbytes / seconds

    def _run(self) -> None:
        while True:
            for number in self._order:
                place = self._free.get()
                if place is None:
                    return
                began, error = time.perf_counter(), None
                try:
                    nbytes = self._fill(number, self._buffers[place])
                    self.nbytes += nbytes
                    self._count(nbytes, time.perf_counter() - began)
                except Exception as raised:
                    error = raised
                self._filled.put((number, place, error))

    def _count(self, nbytes: int, seconds: float) -> None:
        before, took = self._recent
        self._recent = before + (nbytes - before) / RECENT, took + (seconds - took) / RECENT

    @contextmanager
    def use(self, wanted: int) -> Iterator[B]:
        """The buffer with `wanted`; it is filled with another one afterwards. Others before it are left out: a pass
        that failed did not use them. Raises what `fill` raised."""
        began = time.perf_counter()
        while True:
            number, place, error = self._filled.get()
            if number == wanted and error is None:
                break
            self._free.put(place)
            if number == wanted and error is not None:
                raise error
            self.skipped += 1
        self.waited_s += time.perf_counter() - began
        try:
            yield self._buffers[place]
        finally:
            self._free.put(place)

    def close(self) -> None:
        """Nobody uses a buffer, now or later. Idempotent."""
        self._free.put(None)
        self._thread.join()

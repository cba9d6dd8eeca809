"""Reads cold blocks into the window, layer by layer, ahead of the layers that need them.

One block of the arena has room for one layer of as many blocks as the model has layers, one *piece*:

    a block of the arena    [layer 0 | layer 1 | ... | layer L - 1]     of one block
    as part of the window   [block i | block i+1 | ... | block i+L-1]   one layer of each

A thread fills the window's blocks in turn and waits only when all of them are filled; the engine thread gives a block
back when it has attended to it. Each piece is one call of numpy, which copies without the interpreter lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Semaphore
from types import TracebackType
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.uint8]]
"""[blocks * layers, bytes of a layer]: the layers of an arena's blocks, one after the other."""


class Reader:
    """Reads from `tier` into `arena`."""

    def __init__(self, tier: Rows, arena: Rows, num_layers: int, first: Callable[[], None] = lambda: None) -> None:
        """first: what its thread calls when it begins."""
        self._tier, self._arena, self._layers = tier, arena, num_layers
        self._thread = ThreadPoolExecutor(1, "cold", first)
        self.nbytes = 0  # read so far
        self.seconds = 0.0  # in which the thread copied

    @property
    def num_layers(self) -> int:
        return self._layers

    def read(self, slots: Sequence[int], window: Sequence[int], layers: range) -> Reading:
        """Begin when the returned context is entered."""
        return Reading(self, slots, window, layers)

    def submit(self, reading: Reading) -> Future[None]:
        return self._thread.submit(reading.run)

    def copy(self, layer: int, slots: Rows, block_id: int) -> None:
        """One layer of these slots [n] int64, n at most the number of layers, to a block of the arena."""
        begin = time.perf_counter()
        first = block_id * self._layers
        target = self._arena[first : first + len(slots)]
        np.take(self._tier, slots * self._layers + layer, axis=0, out=target, mode="clip")
        self.nbytes += target.nbytes
        self.seconds += time.perf_counter() - begin

    def close(self) -> None:
        """No reading is under way."""
        self._thread.shutdown(wait=True)
        del self._tier, self._arena  # they keep the memory mapped


class Reading:
    """One pass over some layers of some slots (engine.step.cold.Pieces), as a context."""

    def __init__(self, reader: Reader, slots: Sequence[int], window: Sequence[int], layers: range) -> None:
        places = np.array(slots, dtype=np.int64)
        self._reader, self._window, self._layers = reader, list(window), layers
        self._cuts = [places[at : at + reader.num_layers] for at in range(0, len(places), reader.num_layers)]
        self._free = Semaphore(len(self._window))
        self._filled: SimpleQueue[int | BaseException] = SimpleQueue()
        self._stopped = False
        self._running: Future[None] | None = None

    def __enter__(self) -> Reading:
        if self._cuts:
            self._running = self._reader.submit(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stopped = True
        self._free.release()
        if self._running is not None:
            self._running.result()

    def run(self) -> None:
        """In the reader's thread."""
        turn = 0
        try:
            for layer in self._layers:
                for cut in self._cuts:
                    self._free.acquire()
                    if self._stopped:
                        return
                    block_id = self._window[turn % len(self._window)]
                    self._reader.copy(layer, cut, block_id)
                    self._filled.put(block_id)
                    turn += 1
        except BaseException as error:
            self._filled.put(error)

    def layer(self) -> Iterator[tuple[int, int]]:
        """See engine.step.cold.Pieces."""
        for cut in self._cuts:
            found = self._filled.get()
            if isinstance(found, BaseException):
                raise found
            yield found, len(cut)
            self._free.release()

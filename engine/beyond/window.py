"""Reads cold blocks into the window, layer by layer, ahead of the layers that need them.

One block of the arena has room for one layer of as many blocks as the model has layers:

    a block of the arena    [layer 0 | layer 1 | ... | layer L - 1]     of one block
    as part of the window   [block i | block i+1 | ... | block i+L-1]   one layer of each

The window is cut into a few *pieces* of equal size. A thread fills them in turn and waits only when all of them are
filled; the engine thread gives a piece back when it has attended to it. numpy copies without the interpreter lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from engine.step.cold import Places

PIECES = 3
"""One is computed with, one is filled, one is ready."""

Rows = np.ndarray[Any, np.dtype[np.uint8]]
"""[blocks * layers, bytes of a layer]: the layers of an arena's blocks, one after the other."""

Slots = np.ndarray[Any, np.dtype[np.int64]]


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

    def copy(self, layer: int, slots: Slots, blocks: Sequence[int]) -> None:
        """One layer of these slots [n] to blocks of the arena."""
        begin, rows = time.perf_counter(), slots * self._layers + layer
        for at, block_id in zip(range(0, len(rows), self._layers), blocks, strict=False):
            some, first = rows[at : at + self._layers], block_id * self._layers
            target = self._arena[first : first + len(some)]
            np.take(self._tier, some, axis=0, out=target, mode="clip")
            self.nbytes += target.nbytes
        self.seconds += time.perf_counter() - begin

    def close(self) -> None:
        """No reading is under way."""
        self._thread.shutdown(wait=True)
        del self._tier, self._arena  # they keep the memory mapped


class Reading:
    """One pass over some layers of some slots (engine.step.cold.Pieces), as a context."""

    def __init__(self, reader: Reader, slots: Sequence[int], window: Sequence[int], layers: range) -> None:
        self._reader, self._layers = reader, layers
        size = max(1, len(window) // PIECES)
        self._pieces = [list(window[at : at + size]) for at in range(0, len(window) // size * size, size)]
        each = np.arange(reader.num_layers, dtype=np.int32)
        self._places = [
            np.concatenate([block * reader.num_layers + each for block in piece], dtype=np.int32)
            for piece in self._pieces
        ]
        places, most = np.array(slots, dtype=np.int64), size * reader.num_layers
        self._cuts = [places[at : at + most] for at in range(0, len(places), most)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for piece in range(len(self._pieces)):
            self._free.put(piece)
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
        self._free.put(0)
        if self._running is not None:
            self._running.result()

    def run(self) -> None:
        """In the reader's thread."""
        try:
            for layer in self._layers:
                for cut in self._cuts:
                    piece = self._free.get()
                    if self._stopped:
                        return
                    self._reader.copy(layer, cut, self._pieces[piece])
                    self._filled.put(piece)
        except BaseException as error:
            self._filled.put(error)

    def layer(self) -> Iterator[Places]:
        """See engine.step.cold.Pieces."""
        for cut in self._cuts:
            found = self._filled.get()
            if isinstance(found, BaseException):
                raise found
            yield self._places[found][: len(cut)]
            self._free.put(found)

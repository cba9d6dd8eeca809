"""Reads cold blocks into the window, layer by layer, ahead of the layers that need them.

One block of the arena has room for one layer of as many blocks as the model has layers:

    a block of the arena    [layer 0 | layer 1 | ... | layer L - 1]     of one block
    as part of the window   [block i | block i+1 | ... | block i+L-1]   one layer of each

The window is cut into a few *pieces* of equal size. A thread fills them in turn and waits only when all of them are
filled; the engine thread gives a piece back when it has attended to it.
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

HELPERS = 4
"""Threads that fill a piece: a disk answers several small reads at once."""

Rows = np.ndarray[Any, np.dtype[np.uint8]]
"""[blocks * layers, bytes of a layer]: the layers of an arena's blocks, one after the other."""

Fill = Callable[[int, int, memoryview], None]
"""fill(place, layer, into): read one layer of a cold block. Called in several threads."""


class Reader:
    """Reads into `arena`."""

    def __init__(self, arena: Rows, num_layers: int, first: Callable[[], None] = lambda: None) -> None:
        """first: what each of its threads calls when it begins."""
        self._arena, self.num_layers = arena, num_layers
        self._thread = ThreadPoolExecutor(1, "cold", first)
        self._helpers = ThreadPoolExecutor(HELPERS, "cold-read", first)
        self.nbytes = 0  # read so far
        self.seconds = 0.0  # in which it read

    def read(self, fill: Fill, places: Sequence[int], window: Sequence[int], layers: range) -> Reading:
        """Begin when the returned context is entered."""
        return Reading(self, fill, places, window, layers)

    def submit(self, reading: Reading) -> Future[None]:
        return self._thread.submit(reading.run)

    def copy(self, fill: Fill, layer: int, places: Sequence[int], targets: Places) -> None:
        """One layer of these blocks to these places of the arena, as many of both."""
        begin = time.perf_counter()
        pairs = list(zip(places, targets.tolist(), strict=True))

        def some(share: int) -> None:
            for place, target in pairs[share::HELPERS]:
                fill(place, layer, self._arena[target].data)

        for _ in self._helpers.map(some, range(min(HELPERS, len(pairs)))):
            pass
        self.nbytes += len(pairs) * self._arena.shape[1]
        self.seconds += time.perf_counter() - begin

    def close(self) -> None:
        """No reading is under way."""
        self._thread.shutdown(wait=True)
        self._helpers.shutdown(wait=True)
        del self._arena  # it keeps the memory mapped


class Reading:
    """One pass over some layers of some blocks, as a context."""

    def __init__(self, reader: Reader, fill: Fill, places: Sequence[int], window: Sequence[int], layers: range) -> None:
        self._reader, self._fill, self._layers = reader, fill, layers
        size = max(1, len(window) // PIECES)
        each = np.arange(reader.num_layers, dtype=np.int32)
        rows = [block * reader.num_layers + each for block in window]
        self._pieces: list[Places] = [
            np.concatenate(rows[at : at + size], dtype=np.int32) for at in range(0, len(window) // size * size, size)
        ]
        most = size * reader.num_layers
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
                    self._reader.copy(self._fill, layer, cut, self._pieces[piece][: len(cut)])
                    self._filled.put(piece)
        except BaseException as error:
            self._filled.put(error)

    def layer(self) -> Iterator[Places]:
        """The next layer's pieces: where the arena has that layer of the blocks until the next piece is asked for."""
        for cut in self._cuts:
            found = self._filled.get()
            if isinstance(found, BaseException):
                raise found
            yield self._pieces[found][: len(cut)]
            self._free.put(found)

"""A device whose memory is ordinary memory, and whose copies happen later, in a thread, in the order they were queued:
a buffer that is used again too early shows as wrong bytes."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor


class FakeCopying:
    def __init__(self, future: Future) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class FakeDevice:
    location = "fake:0"

    def __init__(self, nbytes: int, seed: int = 0, most_s: float = 0.003) -> None:
        self.nbytes = nbytes
        self.memory = bytearray(nbytes)
        self.pinned: list[str] = []
        self.log: list[tuple[str, str]] = []  # ("begin" or "end", direction) of every queued copy
        self.broken = False
        self._rng = random.Random(seed)
        self._most_s = most_s
        self._queue = ThreadPoolExecutor(1)

    def pin(self, region) -> None:
        self.pinned.append(region.name)

    def unpin(self, region) -> None:
        self.pinned.remove(region.name)

    def copy_out(self, host, moves):
        return self._enqueue("out", host, list(moves))

    def copy_in(self, host, moves):
        return self._enqueue("in", host, list(moves))

    def _enqueue(self, direction, host, moves):
        return FakeCopying(self._queue.submit(self._copy, direction, host, moves, self._rng.random() * self._most_s))

    def _copy(self, direction, host, moves, delay_s):
        self.log.append(("begin", direction))
        time.sleep(delay_s)
        if self.broken:
            raise RuntimeError("the device fell off the bus")
        for here, there, length in moves:
            if direction == "out":
                host.memory[there : there + length] = self.memory[here : here + length]
            else:
                self.memory[here : here + length] = host.memory[there : there + length]
        self.log.append(("end", direction))

    def close(self) -> None:
        self._queue.shutdown()

"""An SSD: reads and writes share its bandwidth evenly, and each block also takes 1 / IOPS of its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.simulator.models.loop import Loop


@dataclass(slots=True, eq=False)
class Transfer:
    left: float  # seconds of the whole device
    done: Callable[[], None]


class Disk:
    """The SSD of one node: processor sharing."""

    def __init__(self, loop: Loop, bytes_s: float, iops: float) -> None:
        self.busy_s = 0.0
        self._loop, self._bytes_s, self._iops = loop, bytes_s, iops
        self._under_way: list[Transfer] = []
        self._since = 0.0
        self._version = 0

    def move(self, blocks: int, nbytes: float, done: Callable[[], None]) -> None:
        """Read or write `blocks` blocks of `nbytes` in total; `done` is called at the end."""
        self._age()
        self._under_way.append(Transfer(self._alone(blocks, nbytes), done))
        self._next()

    def seconds(self, blocks: int, nbytes: float) -> float:
        """How long `move` would take now without new moves: it shares the device with each running move until the
        shorter of the two ends."""
        self._age()
        alone = self._alone(blocks, nbytes)
        return alone + sum(min(transfer.left, alone) for transfer in self._under_way)

    def _alone(self, blocks: int, nbytes: float) -> float:
        return nbytes / self._bytes_s + blocks / self._iops

    def _age(self) -> None:
        passed = self._loop.now - self._since
        self._since = self._loop.now
        if self._under_way:
            self.busy_s += passed
            for transfer in self._under_way:
                transfer.left -= passed / len(self._under_way)

    def _next(self) -> None:
        self._version += 1
        if self._under_way:
            soonest = min(transfer.left for transfer in self._under_way)
            self._loop.after(max(0.0, soonest) * len(self._under_way), self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._age()
        soonest = min(transfer.left for transfer in self._under_way)
        ended = [transfer for transfer in self._under_way if transfer.left <= soonest]
        self._under_way = [transfer for transfer in self._under_way if transfer.left > soonest]
        self._next()
        for transfer in ended:
            transfer.done()

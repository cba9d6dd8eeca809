"""A running submission: its slices, how many are in queues, and the events that it still waits for.

A submission ends only when no byte of it moves any more, so its memory may be freed immediately. A job that has failed
on one rail therefore waits for its slices in the queues of the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from net.errors import TransferError
from net.transfer.common import rails
from net.transfer.common.landed import LandedSpans
from net.transfer.common.spans import Span
from net.transfer.common.transport import Op
from net.transfer.rdma.queue_pair import WorkRequest

SLICE_BYTES = 1 << 20
"""Bytes of one request: long enough for line rate, short enough to stripe, and not above what Soft-RoCE can READ."""

SLICE_ATTEMPTS = 9  # of one slice


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A region of the peer: its address, and its key on each rail."""

    address: int
    nbytes: int
    keys: Sequence[int]
    distances: Sequence[int] = ()  # net.transfer.common.topology NEAR or FAR, of each rail


@dataclass(slots=True, eq=False)
class Slice:
    """One request of a job. `make(rail, slice)` makes the request for the rail that sends it."""

    job: Submission
    make: Callable[[int, Slice], WorkRequest]
    local: int = 0  # offsets in the two regions, bytes
    remote: int = 0
    length: int = 0
    attempts: int = 0


@dataclass(slots=True, eq=False)
class Submission:
    """One submission. `once`: it must not be repeated, so it fails if its rail fails."""

    op: Op
    once: bool = False
    priority: int = 0
    distances: Sequence[int] = ()  # of the rails from the memory; empty: all equal
    landed: LandedSpans | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waiting: deque[Slice] = field(default_factory=deque)
    under_way: int = 0  # slices in queues
    unsettled: set[int] = field(default_factory=set)  # broken rails on whose old queue pair a WRITE may still land
    ending: Exception | None = None  # nothing more is posted, and `done` gets this when nothing moves any more

    def add(self, spans: Iterable[Span], make: Callable[[int, Slice], WorkRequest]) -> None:
        """Append the slices of `spans` to `waiting`."""
        for here, there, length in spans:
            for offset, size in rails.cut(here, length, SLICE_BYTES):
                self.waiting.append(Slice(self, make, offset, there + offset - here, size))

    def posted(self) -> Slice:
        """The next slice, for a queue."""
        self.under_way += 1
        return self.waiting.popleft()

    def arrived(self, piece: Slice) -> None:
        """One slice is done."""
        self.under_way -= 1
        if self.landed is not None:
            self.landed.add([(piece.local, piece.remote, piece.length)])
        self.finish_if_idle()

    def came_back(self, piece: Slice, rail: int, rail_name: str) -> None:
        """A rail failed with this slice; the slice may have arrived or not."""
        self.under_way -= 1
        piece.attempts += 1
        if self.op is Op.WRITE:
            self.unsettled.add(rail)
        if self.ending is not None:
            return
        if self.once:
            self.stop(TransferError(f"{rail_name} broke; the operation may or may not have taken effect"))
        elif piece.attempts >= SLICE_ATTEMPTS:
            self.stop(TransferError(f"a slice failed {SLICE_ATTEMPTS} times, last on {rail_name}"))
        else:
            self.waiting.appendleft(piece)

    def settled(self, rail: int) -> None:
        """The peer's old queue pair of this rail receives nothing any more."""
        self.unsettled.discard(rail)
        self.finish_if_idle()

    def stop(self, error: Exception) -> None:
        """Post nothing more; `done` gets the first such error when nothing moves any more."""
        self.waiting.clear()
        self.ending = self.ending or error
        self.finish_if_idle()

    def lost(self, error: Exception) -> None:
        """The queue pairs are closed, so nothing moves any more: end now."""
        self.waiting.clear()
        if not self.done.done():
            self._end(error)

    def finish_if_idle(self) -> None:
        """End if nothing moves any more: the job is complete or has failed."""
        if self.idle and not self.done.done():
            self._end(self.ending)

    def _end(self, error: Exception | None) -> None:
        if error is None:
            self.done.set_result(None)
            return
        self.done.set_exception(error)
        self.done.exception()  # the waiting task may have been cancelled

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.under_way and not self.unsettled

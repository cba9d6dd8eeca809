"""Work in flight to one peer: jobs, their slices in the queues of the rails, and their completions.

Slices are sent on the rails nearest to both memories (net/transfer/common/topology.py) that are up: urgent jobs first,
older jobs before younger ones. A rail's queue contains at most BULK_WINDOW bytes of bulk, because a queue is served in
order, and urgent slices would wait behind the bulk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.errors import PeerLost, TransferError
from net.transfer.common import rails
from net.transfer.common.rails import Rail
from net.transfer.common.transport import BULK
from net.transfer.rdma.job import Slice, Submission
from net.transfer.rdma.queue_pair import QueuePair

CANCEL_S = 5.0  # for queued slices of a cancelled transfer
BULK_WINDOW = 8 << 20  # bytes: 0.3 ms at 25 GB/s, many times the content of such a wire


class Pump:
    """Jobs over `rails`; `pairs`: their queue pairs, set when they are open. `on_broken(rail)` is called for a broken
    rail before its slices are posted elsewhere."""

    def __init__(self, rails: Sequence[Rail], on_broken: Callable[[int], None]) -> None:
        self.rails = rails
        self.pairs: list[QueuePair] = []
        self.jobs: dict[Submission, None] = {}  # oldest first
        self._on_broken = on_broken
        self._lost: PeerLost | None = None

    async def run(self, job: Submission) -> None:
        """Returns or raises, also if cancelled, only when no byte of the job moves any more. Raises TransferError,
        PeerLost."""
        if self._lost is not None:
            raise self._lost
        self.jobs[job] = None
        try:
            self.pump()
            await asyncio.shield(job.done)
        except asyncio.CancelledError:
            job.stop(TransferError("it was cancelled"))
            await self._settle(job)
            raise
        finally:
            self.jobs.pop(job, None)

    async def _settle(self, job: Submission) -> None:
        """Return when a cancelled job has ended, even if this wait is cancelled. Queues that take too long are broken
        off; then the peer confirms this or is lost (net/transfer/rdma/revival.py)."""
        patience: float | None = CANCEL_S
        until = time.monotonic() + CANCEL_S
        while not job.done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([job.done], timeout=patience)
            if patience is None:
                continue
            patience = max(0.0, until - time.monotonic())
            if not job.done.done() and not patience:
                patience = None
                for pair in self.pairs:
                    pair.break_off("a cancelled transfer did not end")

    def pump(self) -> None:
        """Post waiting slices while the rails have room."""
        room = [pair.room for pair in self.pairs]
        batches: list[list[Slice]] = [[] for _ in self.pairs]
        now = time.monotonic()
        for job in sorted(self.jobs, key=lambda job: -job.priority):
            window = BULK_WINDOW if job.priority <= BULK else None
            while job.waiting:
                index = rails.choose(self.rails, job.waiting[0].length, room, job.distances, window)
                if index is None:
                    break
                piece = job.posted()
                room[index] -= 1
                self.rails[index].sent(now, piece.length)
                batches[index].append(piece)
        for index, batch in enumerate(batches):
            if batch and self.pairs[index].ready:
                self.pairs[index].post([piece.make(index, piece) for piece in batch])
            elif batch:  # the rail broke while another batch was posted
                self._again(index, batch)

    # --- reports of the queue pairs

    def done_on(self, index: int) -> Callable[[list[Slice]], None]:
        def done(pieces: list[Slice]) -> None:
            now = time.monotonic()
            for piece in pieces:
                self.rails[index].arrived(now, piece.length)
                piece.job.arrived(piece)
            self.pump()

        return done

    def error_on(self, index: int) -> Callable[[list[Slice], str, bool], None]:
        def error(pieces: list[Slice], why: str, refused: bool) -> None:
            self.rails[index].failed(time.monotonic())
            if refused and pieces:
                # The peer's memory is gone: the fault of the transfer, so the rail is reopened immediately.
                self.rails[index].retry_at = 0.0
                pieces[0].job.stop(TransferError(f"the peer refused the memory of a transfer: {why}"))
            self._again(index, pieces)
            self._on_broken(index)
            self.pump()

        return error

    def _again(self, index: int, pieces: Sequence[Slice]) -> None:
        rail = self.rails[index]
        rail.resent += len(pieces)
        for piece in reversed(pieces):
            piece.job.came_back(piece, index, rail.name)
        for job in {piece.job for piece in pieces}:
            job.finish_if_idle()

    def end(self, lost: PeerLost) -> None:
        """The peer is gone, and the queue pairs are closed: nothing moves any more."""
        self._lost = lost
        for job in list(self.jobs):
            job.lost(lost)

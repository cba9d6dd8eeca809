"""Who waits and who runs on a node, and what running takes: a seat in the batch and blocks for the tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cache.pool import OutOfBlocks
from engine.block_book import BlockBook
from engine.request import Request, RequestState
from sched.classes import RANK


class Seats:
    """Every unfinished request of a node. Those in `waiting` (a set in order of arrival here) want a seat, those in
    `running` have one; a request whose KV is still being pushed here is in neither."""

    def __init__(self, blocks: BlockBook, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0

    def check_new(self, request: Request) -> None:
        """Raises ValueError for an id that is taken."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already running here")

    def wait(self, now: float, request: Request) -> None:
        """Queue a request that has no seat."""
        self.requests[request.request_id] = request
        request.move(now, RequestState.WAITING)
        self.waiting.append(request)

    def handed_over(self) -> list[Request]:
        """Waiting requests whose KV was pushed here, all but the last token's: they decode as soon as they have a
        seat. Oldest first."""
        return sorted(self._handed_over(), key=lambda request: request.arrival)

    def _handed_over(self) -> Iterator[Request]:
        return (r for r in self.waiting if r.handed_over and r.state is RequestState.WAITING and r.num_uncomputed == 1)

    def prompts(self) -> list[Request]:
        """What has prompt tokens left and could run now, begun or not."""
        ready = set(self._handed_over())
        waiting = [r for r in self.waiting if r.state is RequestState.WAITING and r not in ready]
        return [r for r in self.running if r.num_uncomputed > 1] + waiting

    # --- taking a seat

    def may_start(self, request: Request) -> bool:
        """Are a seat and blocks for all its known tokens free? It takes its cached prefix now."""
        if len(self.running) >= self.max_num_seqs:
            return False
        if self.blocks.adopt_prefix(request):
            request.count_cached()
        if not self.blocks.fits(request) and not self.running:
            self._give_back([r for r in self.waiting if r is not request])
        return self.blocks.fits(request)

    def start(self, now: float, request: Request) -> None:
        """Only after `may_start`."""
        self.waiting.remove(request)
        self.running.append(request)
        request.move(now, RequestState.RUNNING, computed=request.num_computed)

    def grow(self, now: float, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens of a running request: if need be those of prefixes that waiting requests have
        taken, then of the newest running request of the lowest class. False when that was `request` itself, which
        waits now."""
        while True:
            try:
                self.blocks.extend(request, count)
                return True
            except OutOfBlocks:
                if self._give_back([r for r in self.waiting if not r.handed_over]):
                    continue
                victim = max(self.running, key=lambda r: (RANK[r.service_class], r.arrival))
                self._preempt(now, victim)
                if victim is request:
                    return False

    # --- giving it up

    def _preempt(self, now: float, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.looked_up = False
        request.move(now, RequestState.WAITING, preempted=True)
        self.waiting.append(request)

    def _give_back(self, waiting: Sequence[Request]) -> bool:
        """Others need the blocks these sit on; False when they have none. Nobody takes a prefix from a load."""
        holders = [r for r in waiting if r.state is RequestState.WAITING and r.block_ids]
        for request in holders:
            self.blocks.release(request)
            request.looked_up = False
        return bool(holders)

    def leave(self, now: float, request: Request, reason: str) -> None:
        """The request ends. Its blocks are the caller's to release: a running step may still write to them."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.finish_reason = reason
        request.move(now, RequestState.FINISHED, reason=reason)

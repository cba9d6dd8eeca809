"""Who waits and who runs on a node, and what running takes: a seat in the batch and blocks for the tokens. Pure.

One order (sched/queueing.py) says who is next, whatever a request waits for: prompts, hand-overs from prefill nodes,
requests that lost their seat, and claims on blocks for KV that is to be pushed here. What comes first keeps what comes
behind it from starting. It may take from those behind it that are of a lower class: their seats (they keep their
blocks and go on where they were), and their blocks if need be (what was named stays in the prefix cache). Nobody loses
a seat or blocks to a request that comes behind it in the order: where the order starves nobody, neither does this.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.pool.block_pool import OutOfBlocks
from engine.step.block_book import BlockBook
from engine.step.request import Request, RequestState
from sched.classes import RANK
from sched.queueing import QueueOrder


class Seats:
    """Every unfinished request of a node. Those in `waiting` (a set in order of arrival here) want a seat, those in
    `running` have one; a request whose KV is still being pushed here is in neither. `claims` want blocks for such KV
    and are not yet requests of this node."""

    def __init__(self, blocks: BlockBook, max_num_seqs: int, order: QueueOrder) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self._order = order
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.claims: list[Request] = []
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

    def ready(self) -> list[Request]:
        """Waiting requests that have the KV of all tokens but the last: pushed here, or computed before they lost their
        seat. They decode as soon as they have one."""
        return [r for r in self.waiting if r.resumes and r.state is RequestState.WAITING and r.num_uncomputed == 1]

    def prompts(self) -> list[Request]:
        """What has prompt tokens left and could run now, begun or not."""
        ready = set(self.ready())
        waiting = [r for r in self.waiting if r.state is RequestState.WAITING and r not in ready]
        return [r for r in self.running if r.num_uncomputed > 1] + waiting

    def queue(self, now: float) -> list[Request]:
        """All that waits for a seat or for blocks, next first; claims too."""
        return self._order.order(now, [*self.waiting, *self.claims]) if self.waiting or self.claims else []

    def queue_before(self, now: float, request: Request) -> list[Request]:
        """Of the queue, those that lack blocks and come before `request`, which may be a claim itself."""
        others = [*self.waiting, *self.claims]
        ordered = self._order.order(now, others if request in self.claims else [*others, request])
        return [r for r in ordered[: ordered.index(request)] if self.blocks.lacks(r) > 0]

    def first_but_prompts(self, now: float) -> Request | None:
        """The next hand-over, request that lost its seat, or claim."""
        others = [*self.ready(), *self.claims]
        return self._order.order(now, others)[0] if others else None

    # --- taking a seat

    def may_start(self, now: float, request: Request, seats: int = 0, blocks: int = 0) -> bool:
        """Are a seat and blocks for all its known tokens to be had, `seats` and `blocks` left for what comes before it?
        It takes its cached prefix now."""
        if len(self.running) + seats >= self.max_num_seqs and self._seat_of(now, request) is None:
            return False
        if self.blocks.adopt_prefix(request):
            request.count_cached()
        if self.blocks.lacks(request) + blocks <= self.blocks.pool.num_free:
            return True
        if not self.running:  # whatever their turn: somebody must go on
            others = self._order.order(now, [r for r in self.waiting if r is not request])
            self._strip(now, others[::-1], self.blocks.lacks(request) + blocks)
        else:
            self.make_room(now, request, self.blocks.lacks(request) + blocks)
        return self.blocks.lacks(request) + blocks <= self.blocks.pool.num_free

    def start(self, now: float, request: Request, seats: int = 0) -> None:
        """Only after `may_start`."""
        if len(self.running) + seats >= self.max_num_seqs and (victim := self._seat_of(now, request)) is not None:
            self._pause(now, victim)
        request.paused = False
        self.waiting.remove(request)
        self.running.append(request)
        request.move(now, RequestState.RUNNING, computed=request.num_computed)

    def grow(self, now: float, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens of a running request: if need be those of prefixes that waiting requests have
        taken, then of whoever comes last. False when that was `request` itself, which waits now."""
        while True:
            try:
                self.blocks.extend(request, count)
                return True
            except OutOfBlocks:
                ready = set(self.ready())
                if self._give_back([r for r in self.waiting if r not in ready]):
                    continue
                victim = self._order.order(now, [*self.running, *(r for r in ready if r.block_ids)])[-1]
                self.lose(now, victim)
                if victim is request:
                    return False

    # --- giving it up

    def make_room(self, now: float, request: Request, need: int) -> None:
        """Have `need` blocks free for `request`, if those of lower classes behind it are enough for that."""
        behind = [r for r in self._others(now, request) if RANK[r.service_class] > RANK[request.service_class]]
        short = need - self.blocks.pool.num_free
        if short > 0 and sum(len(r.block_ids) for r in behind) >= short:
            self._strip(now, behind, need)

    def lose(self, now: float, request: Request) -> None:
        """Its blocks go, and the seat if it has one: what is still in the prefix cache by then it finds again."""
        self.blocks.release(request)
        request.looked_up = request.paused = False
        self._count(request)
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.waiting.append(request)
        request.move(now, RequestState.WAITING, preempted=True)

    def _pause(self, now: float, request: Request) -> None:
        """Its seat goes, and it keeps its blocks."""
        self.running.remove(request)
        self.waiting.append(request)
        request.paused = True
        self._count(request)
        request.move(now, RequestState.WAITING, paused=True)

    def _count(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _seat_of(self, now: float, request: Request) -> Request | None:
        """Whose seat `request` may have: that of the last of the lower classes, unless it comes before `request`."""
        lower = [r for r in self.running if RANK[r.service_class] > RANK[request.service_class]]
        last = self._order.order(now, [request, *lower])[-1]
        return None if last is request else last

    def _others(self, now: float, request: Request) -> list[Request]:
        """Requests with blocks that come behind `request`, the last one first."""
        waiting = (r for r in self.waiting if r.state is RequestState.WAITING)
        holders = [r for r in (*self.running, *waiting) if r.block_ids and r is not request]
        ordered = self._order.order(now, [request, *holders])
        return ordered[: ordered.index(request) : -1]

    def _strip(self, now: float, holders: Sequence[Request], need: int) -> None:
        """Take the blocks of one after the other until `need` are free."""
        for holder in holders:
            if self.blocks.pool.num_free >= need:
                return
            if not holder.block_ids or holder.state not in (RequestState.RUNNING, RequestState.WAITING):
                continue
            if holder.state is RequestState.RUNNING or holder.resumes:
                self.lose(now, holder)
            else:
                self._give_back([holder])

    def _give_back(self, waiting: Sequence[Request]) -> bool:
        """Others need the blocks these sit on; False when they have none. Nobody takes a prefix from a load."""
        holders = [r for r in waiting if r.state is RequestState.WAITING and r.block_ids]
        for request in holders:
            self.blocks.release(request)
            request.looked_up = request.paused = False
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

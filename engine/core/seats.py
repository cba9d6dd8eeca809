"""Decides which requests of a node run and which wait. A running request has blocks for its tokens and, if it is not a
part of a long prompt, one of `max_num_seqs` seats. Pure.

One order (sched/queueing.py) covers all waiting requests: prompts, hand-overs from prefill nodes, requests that lost
their seat, and claims on blocks for KV that another node will push here. An earlier request keeps later ones from
starting. It may take resources from later requests of a lower class: first their seats (they keep their blocks and
continue later), then if necessary their blocks (named blocks stay in the prefix cache). A request never loses a seat or
blocks to a later one, so if the order is free of starvation, the seats are too.

Parts of long prompts hold blocks on one node and wait for them on another. `give_way` keeps two groups from waiting for
each other, by a second order that is the same on all nodes (sched/placement/groups/giving_way.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.pool.block_pool import OutOfBlocks
from engine.step.block_book import BlockBook
from engine.step.request import Request, RequestState
from sched.classes import RANK
from sched.placement.groups.giving_way import Holder, ends, in_the_way
from sched.queueing import QueueOrder


class Seats:
    """Every unfinished request of a node. Requests in `waiting` (a list in order of arrival here) need a seat; those in
    `running` have one. A request whose KV is still being pushed here is in neither. `claims` need blocks for such KV
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
        """Raises ValueError if the request's id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already running here")

    def wait(self, now: float, request: Request) -> None:
        """Queue a request without a seat."""
        self.requests[request.request_id] = request
        request.move(now, RequestState.WAITING)
        self.waiting.append(request)

    def ready(self) -> list[Request]:
        """Waiting requests with the KV of all tokens except the last, pushed here or computed before they lost their
        seat. They decode as soon as they have a seat."""
        return [r for r in self.waiting if r.resumes and r.state is RequestState.WAITING and r.decodes]

    def prompts(self) -> list[Request]:
        """Running and waiting requests with prompt tokens left that could run now."""
        ready = set(self.ready())
        waiting = [r for r in self.waiting if r.state is RequestState.WAITING and r not in ready]
        found = [r for r in self.running if not r.decodes] + waiting
        return [r for r in found if r.num_ready > 0]

    def queue(self, now: float) -> list[Request]:
        """All requests and claims that wait for a seat or blocks, next first."""
        return self._order.order(now, [*self.waiting, *self.claims]) if self.waiting or self.claims else []

    def queue_before(self, now: float, request: Request) -> list[Request]:
        """Requests and claims in the queue that lack blocks and come before `request`, which may be a claim itself."""
        others = [*self.waiting, *self.claims]
        ordered = self._order.order(now, others if request in self.claims else [*others, request])
        return [r for r in ordered[: ordered.index(request)] if self.blocks.lacks(r) > 0]

    def first_but_prompts(self, now: float) -> Request | None:
        """The next in the order among hand-overs, requests that lost their seat, and claims."""
        others = [*self.ready(), *self.claims]
        return self._order.order(now, others)[0] if others else None

    # --- taking a seat

    def may_start(self, now: float, request: Request, seats: int = 0, blocks: int = 0) -> bool:
        """Whether the request can get a seat and blocks for all its known tokens, with `seats` and `blocks` left over
        for earlier requests. It takes its cached prefix now, and may take blocks from other requests."""
        if self._full(request, seats) and self._seat_of(now, request) is None:
            return False
        if self.blocks.adopt_prefix(request):
            request.count_cached()
        if self._needs(request) + blocks <= self.blocks.pool.num_free:
            return True
        if not self.running:  # ignore the order: one request must make progress, and not wait for other nodes
            last_first = self._order.order(now, [r for r in self.waiting if r is not request])[::-1]
            holders = sorted(last_first, key=lambda other: other.part is not None)
            self._strip(now, holders, self._needs(request) + blocks)
        else:
            self.make_room(now, request, self._needs(request) + blocks)
        return self._needs(request) + blocks <= self.blocks.pool.num_free

    def _needs(self, request: Request) -> int:
        """Free blocks with which the request may start. Not those that started parts will take, if it is one: the last
        of them would lose what its group has computed."""
        parts = (r for r in self.running if r.part is not None) if request.part is not None else ()
        return self.blocks.lacks(request) + sum(max(0, self.blocks.lacks(r)) for r in parts)

    def start(self, now: float, request: Request, seats: int = 0) -> None:
        """Give the request a seat. Call it only after `may_start`."""
        if self._full(request, seats) and (victim := self._seat_of(now, request)) is not None:
            self._pause(now, victim)
        request.paused = False
        self.waiting.remove(request)
        self.running.append(request)
        request.move(now, RequestState.RUNNING, computed=request.num_computed)

    def grow(self, now: float, request: Request, count: int) -> bool:
        """Take blocks for `count` more tokens of a running request. If none are free, take them from prefixes of
        waiting requests, then from the last request in the order. Returns False if that was `request` itself, which
        waits now."""
        while True:
            try:
                self.blocks.extend(request, count)
                return True
            except OutOfBlocks:
                holds = set(self._holding())
                if self._give_back([r for r in self.waiting if r not in holds]):
                    continue
                victim = self._order.order(now, [*self.running, *(r for r in holds if r.block_ids)])[-1]
                self.lose(now, victim)
                if victim is request:
                    return False

    def _holding(self) -> list[Request]:
        """Waiting requests whose blocks count like those of running ones, because they would not find them again:
        hand-overs, requests that lost their seat, and parts of long prompts, whose group would begin again."""
        parts = [r for r in self.waiting if r.part is not None and r.state is RequestState.WAITING]
        return [*self.ready(), *parts]

    def give_way(self, now: float) -> None:
        """End groups that could wait for each other: parts that cannot start here although they could compute now, or
        those whose blocks they need. See sched/placement/groups/giving_way.py."""
        for request in self._order.order(now, [r for r in self.waiting if r.part is not None and r.num_ready > 0]):
            part = request.part
            if part is None or request.state is not RequestState.WAITING or not request.num_ready:
                continue  # one before it has taken its blocks
            if (need := self._needs(request)) <= self.blocks.pool.num_free:
                continue
            own, holders = _holder(request), {r.request_id: _holder(r) for r in self.requests.values()}
            del holders[request.request_id]
            self._strip(now, [self.requests[name] for name in in_the_way(own, holders.values())], need)
            if self._needs(request) > self.blocks.pool.num_free and ends(own, holders.values()):
                part.lost = "prompts of other nodes have the blocks that it needs on a node of its group"

    def shut_out(self) -> list[tuple[Request, str]]:
        """Prompts that wait here for blocks which other nodes write, while a node that computes prompts too holds
        blocks for them, each with the reason. See sched/placement/groups/giving_way.py."""
        state = RequestState.WAITING
        waiting = [r for r in self.waiting if r.holds_elsewhere and r.state is state and r.part is None]
        remote = [r for r in self.requests.values() if r.state is RequestState.REMOTE] if waiting else []
        if not remote:  # so a step of a node that only decodes looks at no blocks
            return []
        held = {block for r in remote for block in r.held_blocks}
        left, size = self.blocks.pool.num_blocks - len(held), self.blocks.block_size
        found = []
        for r in waiting:
            need = len(r.block_ids) + self.blocks.lacks(r)
            if need > left and need - len(held.intersection(r.block_ids or self.blocks.match(r))) > left:
                found.append((r, f"KV that other nodes write leaves {left} blocks of {size} tokens: it needs {need}"))
        return found

    # --- giving it up

    def make_room(self, now: float, request: Request, need: int) -> None:
        """Free `need` blocks for `request` if later requests of lower classes hold enough."""
        behind = [r for r in self._others(now, request) if RANK[r.service_class] > RANK[request.service_class]]
        short = need - self.blocks.pool.num_free
        if short > 0 and sum(len(r.held_blocks) for r in behind) >= short:
            self._strip(now, behind, need)

    def lose(self, now: float, request: Request) -> None:
        """Take the request's blocks, and its seat if it has one. Later it reuses the blocks still in the prefix
        cache."""
        self._strip_one(request)
        self._count(request)
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.waiting.append(request)
        request.move(now, RequestState.WAITING, preempted=True)

    def lift(self, now: float, request: Request) -> bool:
        """Take a request that decodes out of the batch; it keeps its blocks. Returns False if it does not decode."""
        if request.handover or request.num_uncomputed != 1 or request.state is RequestState.MOVING:
            return False
        if request.cold is not None:  # a move knows only blocks of the arena
            return False
        if request in self.running:
            self.running.remove(request)
        elif request in self.ready():
            self.waiting.remove(request)
        else:
            return False
        request.move(now, RequestState.MOVING)
        return True

    def put_back(self, now: float, request: Request) -> None:
        """Undo `lift`."""
        request.paused = True
        self.wait(now, request)

    def _pause(self, now: float, request: Request) -> None:
        """Take the request's seat; it keeps its blocks."""
        self.running.remove(request)
        self.waiting.append(request)
        request.paused = True
        self._count(request)
        request.move(now, RequestState.WAITING, paused=True)

    def _count(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _full(self, request: Request, seats: int) -> bool:
        """Whether no seat is left for `request`, if `seats` go to earlier requests.

        A part of a long prompt takes none: it waits for other nodes, and two groups whose parts held the seats that the
        other group waits for would never end."""
        taken = sum(r.part is None for r in self.running)
        return request.part is None and taken + seats >= self.max_num_seqs

    def _seat_of(self, now: float, request: Request) -> Request | None:
        """The request whose seat `request` may take: the last one of a lower class, unless it comes before
        `request`."""
        lower = [r for r in self.running if r.part is None and RANK[r.service_class] > RANK[request.service_class]]
        last = self._order.order(now, [request, *lower])[-1]
        return None if last is request else last

    def _others(self, now: float, request: Request) -> list[Request]:
        """Requests with blocks that come after `request`, last one first."""
        waiting = (r for r in self.waiting if r.state is RequestState.WAITING)
        holders = [r for r in (*self.running, *waiting) if r.block_ids and r is not request]
        ordered = self._order.order(now, [request, *holders])
        return ordered[: ordered.index(request) : -1]

    def _strip(self, now: float, holders: Sequence[Request], need: int) -> None:
        """Take the blocks of `holders`, one after another, until `need` are free."""
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
        """Release the blocks of `waiting` requests, but not of those that load a prefix. Returns False if there were
        none."""
        holders = [r for r in waiting if r.state is RequestState.WAITING and r.block_ids]
        for request in holders:
            self._strip_one(request)
        return bool(holders)

    def _strip_one(self, request: Request) -> None:
        self.blocks.release(request)
        request.looked_up = request.paused = False
        if request.part is not None:
            request.part.lost = "its blocks on a node of its group went to other requests"

    def leave(self, now: float, request: Request, reason: str) -> None:
        """The request ends. The caller releases its blocks, because a running step may still write to them."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.finish_reason = reason
        request.move(now, RequestState.FINISHED, reason=reason)


def _holder(request: Request) -> Holder:
    part = request.part
    runs, comes = request.state is RequestState.RUNNING, part is not None and part.follows and request.num_ready > 0
    return Holder(
        request.request_id,
        RANK[request.service_class],
        has_blocks=bool(request.block_ids),
        part=part is not None and not part.lost,
        begun=part is not None and (runs or comes),
        arrives=request.state is RequestState.REMOTE,
    )

"""The rows of the next step: which requests compute how many tokens, under the token budget. Pure.

Each decode takes one token. The policy decides how much of the rest prefill may use, and the order decides which
prompts get it. A row is chosen only if its request has a seat and blocks for it (seats.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from engine.core.cold_turns import ColdTurns
from engine.core.seats import Seats
from engine.speculation.speculative import Speculator
from engine.step.request import Request, RequestState
from engine.step.step import ScheduledRow
from sched.batching import BatchingPolicy, StepLoad
from sched.classes import BATCH, RANK
from sched.part_turns import PartTurns
from sched.queueing import QueueOrder
from sched.stretch import Waiting


class StepPlanner:
    """Gives requests of `seats` their seats and blocks, and puts them into steps."""

    def __init__(
        self,
        seats: Seats,
        order: QueueOrder,
        policy: BatchingPolicy,
        speculator: Speculator | None,
        most_tokens: int,
        cold: ColdTurns,
    ) -> None:
        """`most_tokens`: the budget of a step; `cold`: the turns of requests beyond memory."""
        self._seats, self._blocks = seats, seats.blocks
        self._order, self._policy, self._speculator = order, policy, speculator
        self._most_tokens, self._cold = most_tokens, cold
        self._part_turns = PartTurns()
        self._part_waits = False  # a part could run, and other prompts go first
        self._part: Request | None = None  # of the last rows
        self.gives_way = False  # the last rows are of class batch, and are computed again if others come meanwhile
        self._others: set[Request] = set()  # that waited when these rows, or a part, were chosen
        self.left_out: list[Request] = []  # of class batch, that the last rows left out for others
        self._for_higher = False  # a row of class batch computes what a higher one waits for

    def rows(self, now: float, in_turn: bool = True) -> list[ScheduledRow]:
        """Decodes first; empty if nothing can run. in_turn: a request that lacks seats or blocks keeps later requests
        in the order from taking them."""
        alone, self.left_out, self._for_higher = self._policy.decodes_wait, [], False
        prefills = self._prefill(now, [], in_turn) if alone else []
        decodes = [] if prefills else self._decode(now, in_turn)
        if not (alone and (prefills or decodes)):  # the last decode may have lost its blocks and become a prompt
            prefills = self._prefill(now, decodes, in_turn)
        prefills = _still_running(prefills)
        for row in prefills:
            self._served(row.request, row.start + row.num_tokens)
        rows = _still_running(decodes) + prefills
        if self._speculator is not None:
            left = self._most_tokens - int(sum(row.work_tokens for row in rows))
            self._speculator.plan(rows, left, self._blocks)
        if self._cold.present:
            self._cold.cut(rows)
        self._part = next((row.request for row in rows if row.request.part is not None), None)
        batch = bool(rows) and all(_of_batch(row.request) and not row.request.apart for row in rows)
        turns = self._part_turns
        may_lose = turns.batch_may_lose if all(row.decodes for row in rows) else turns.batch_gives_way(now)
        again = not self._for_higher and not any(row.num_drafts for row in rows)  # drafts are not proposed again
        self.gives_way = batch and may_lose and again
        if self.gives_way:
            self._others = set(self._higher())
        else:
            self._others = set(self._waiting_others()) if self._part is not None else set()
        self._part_turns.begin(now, self._part is not None, self._part_waits, batch, bool(self.left_out))
        return sorted(rows, key=lambda row: row.num_tokens > 1)

    def ended(self, now: float, gave_way: bool = False) -> None:
        """The step of the last `rows` has ended."""
        self._part_turns.end(now, gave_way)

    def lets_in_at(self) -> float:
        """When the part of the last `rows` has to let other prompts in, or these rows give way, on the clock of `now`;
        inf = nobody waits. Those that come during the step count too."""
        if self.gives_way:
            return 0.0 if any(request not in self._others for request in self._higher()) else inf
        if (part := self._part) is None:
            return inf
        behind = RANK[part.service_class]
        ranked = [
            (rank := RANK[other.service_class], rank < behind or other.decodes, other in self._others)
            for other in self._waiting_others()
        ]
        found = [self._part_turns.lets_in_at(first, was_here) for rank, first, was_here in ranked if rank <= behind]
        return min(found, default=inf)

    def _waiting_others(self) -> list[Request]:
        """Prompts and hand-overs that wait while a step runs, without those that take their own turns."""
        return [r for r in (*self._seats.prompts(), *self._seats.ready()) if not r.apart]

    def _higher(self) -> Iterator[Request]:
        """Of a class above batch, those that wait for a step."""
        parts = (r for r in self._seats.prompts() if r.part is not None and r.num_ready)
        return (r for r in (*self._waiting_others(), *parts) if RANK[r.service_class] < RANK[BATCH.name])

    def _decode(self, now: float, in_turn: bool) -> list[ScheduledRow]:
        """One token for each running request with a computed prompt, then for requests that only need a seat."""
        rows: list[ScheduledRow] = []
        for request in self._cold.awake(now, [r for r in self._seats.running if r.decodes]):
            if len(rows) >= self._most_tokens:
                break
            if request.state is RequestState.RUNNING and request.decodes:  # not preempted in this loop
                self._decode_one(now, request, rows)
        ready = set(self._seats.ready())
        seats = blocks = 0  # which earlier requests in the order wait for
        left = self._most_tokens - sum(row.num_tokens for row in rows)
        for request in self._seats.queue(now) if ready else []:
            if left <= 0:
                break
            if request not in ready:
                seats += request.part is None and request.request_id in self._seats.requests  # a claim: not yet
                blocks += max(0, self._blocks.lacks(request))
            elif not request.decodes:  # it lost its blocks to an earlier request
                continue
            elif self._seats.may_start(now, request, *((seats, blocks) if in_turn else (0, 0))):
                self._seats.start(now, request, seats if in_turn else 0)
                self._served(request, request.num_tokens)
                left -= self._decode_one(now, request, rows)
            elif in_turn:
                break
        return self._without_batch(now, _still_running(rows))

    def _without_batch(self, now: float, decodes: list[ScheduledRow]) -> list[ScheduledRow]:
        """All but those of class batch behind the first one of a higher class in the order, if class batch may lose
        this step."""
        higher = [row.request for row in decodes if _above_batch(row.request)]
        if not higher or not self._part_turns.batch_may_lose:
            return decodes
        first, batch = self._order.order(now, higher)[0], [row.request for row in decodes if _of_batch(row.request)]
        ordered = self._order.order(now, [first, *batch])
        behind = set(ordered[ordered.index(first) + 1 :])
        self.left_out += [request for request in batch if request in behind]
        return [row for row in decodes if row.request not in behind]

    def _decode_one(self, now: float, request: Request, rows: list[ScheduledRow]) -> int:
        """Tokens of its row; 0: it has none."""
        if not self._seats.grow(now, request, 1):
            return 0
        rows.append(self._row(request, 1))
        return rows[-1].num_tokens

    def _prefill(self, now: float, decodes: Sequence[ScheduledRow], in_turn: bool) -> list[ScheduledRow]:
        """Chunks of the next prompts, in the same step as `decodes`. A waiting prompt that cannot start keeps later
        prompts from starting, because they would take the blocks or the seat that it waits for. Hand-overs and claims
        do the same. If another prompt is about to compute the next block of a prompt, that other prompt takes its
        place in the step, so the node computes a shared prefix once. Prompts of class batch fill a step up to their
        slice (sched/part_turns.py) and no more, and mostly not one that begins with another; that of the others does
        not end there. A step has one part at most."""
        prompts = self._cold.awake(now, self._seats.prompts())
        queue, behind = self._turns(now, self._order.order(now, prompts))
        budget = self._prefill_budget(now, decodes, queue, _leading(queue)) if queue else 0
        rows: list[ScheduledRow] = []
        taken: set[str] = set()
        by_budget = not self._cold.present
        whole, slice_tokens = budget, None
        blocked, first = False, self._seats.first_but_prompts(now) if in_turn else None
        for request in (*queue, *behind):
            if (budget <= 0 and by_budget) or (rows and request in behind):
                break
            most = budget
            if _of_batch(request):
                if rows and not _of_batch(rows[0].request) and self._part_turns.batch_may_lose:
                    if request.state is not RequestState.WAITING or self._seats.may_start(now, request):
                        self.left_out.append(request)
                    else:  # it loses nothing
                        blocked = in_turn
                    continue
                if slice_tokens is None:
                    slice_tokens = self._prefill_budget(now, decodes, queue, request)
                most = min(budget, slice_tokens - (whole - budget))
            if most <= 0 and request.cold is None:
                continue
            waits = request.state is RequestState.WAITING
            if waits and first is not None and not blocked:
                blocked = self._order.order(now, [request, first])[0] is first
            if waits and blocked:
                continue
            if waits and rows and request.cold is None and not self._fits(request, most):
                budget = 0 if most == budget else budget  # not the blocks of a row of this step, and then no tokens
                continue
            if waits and not self._seats.may_start(now, request):
                blocked = in_turn
                continue
            if waits and (ahead := self._computing_for(request)) is not None:
                self._for_higher = self._for_higher or not _of_batch(request)
                request, waits = ahead, False
            if request.request_id in taken:
                continue
            if request.cold is not None:  # a few layers at a time: each chunk reads all that is cold
                count, cost = request.num_ready, 0
            elif request.part is not None:  # too: a chunk of fewer tokens would pay the fixed time of more steps
                count = request.part.pending or self._chunk(request, self._most_tokens, whole=False)
                cost = budget
            else:
                count = cost = self._chunk(request, most, whole=bool(rows))
            if not count:
                budget = 0 if most == budget else budget  # nobody who needs it gets tokens now
                continue
            if waits:
                self._seats.start(now, request)
            taken.add(request.request_id)
            if self._seats.grow(now, request, count):
                rows.append(self._row(request, count, most))
                budget -= cost
        return rows

    def _turns(self, now: float, queue: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
        """(prompts of the next step, prompts that get it if none of these can run).

        A part of a long prompt passes the model by itself, so it gains nothing from other prompts in its step, and they
        would wait for it. The two take turns (sched/part_turns.py); a higher class does not wait for its turn.

        A chunk that has passed some of the layers goes on before any other part: a part that waits inside its step for
        other nodes relies on theirs to go on as well (engine/step/exchange.py)."""
        every = [request for request in queue if request.part is not None]
        parts = [request for request in every if request.part is not None and request.part.pending] or every
        others = [request for request in queue if request.part is None]
        if any(request.cold is None and not _of_batch(request) for request in others):
            self._part_turns.seen_higher(now)
        self._part_waits = False
        if not parts or not others:
            return parts or others, ()
        ranks = [min(RANK[request.service_class] for request in some) for some in (every, others)]
        parts_first = ranks[0] < ranks[1] if ranks[0] != ranks[1] else self._part_turns.part_first
        self._part_waits = not parts_first
        return (parts, others) if parts_first else (others, parts)

    def _served(self, request: Request, num_tokens: int) -> None:
        if num_tokens > request.num_served:
            self._order.served(request, num_tokens - request.num_served)
            request.num_served = num_tokens

    def _computing_for(self, request: Request) -> Request | None:
        """The running prompt that will compute the next block of `request`."""
        begun = (other for other in self._seats.running if other.num_uncomputed > 1 and not other.apart)
        return next((other for other in begun if self._blocks.computes_next(request, other)), None)

    def _prefill_budget(
        self, now: float, decodes: Sequence[ScheduledRow], queue: Sequence[Request], first: Request
    ) -> int:
        """Tokens of prompts in a step that begins with `first`."""
        if self._cold.present:
            decodes = [row for row in decodes if row.request.cold is None]  # others: cold_turns.py
        left = self._most_tokens - sum(row.num_tokens for row in decodes)
        context = sum(row.start + row.num_tokens for row in decodes)
        classes = {row.request.service_class for row in decodes}
        prompts = [
            Waiting(r.service_class, now - r.arrival, r.num_uncomputed, r.num_computed) for r in queue if decodes
        ]
        most_s = self._part_turns.batch_s(now) if _of_batch(first) and first.part is None else inf
        load = StepLoad(left, len(decodes), context, first.num_computed, classes, prompts, most_s)
        return min(left, self._policy.prefill_tokens(load))

    def _chunk(self, request: Request, budget: int, whole: bool) -> int:
        """Tokens of `request` for a step with `budget` left. A chunk that does not finish the prompt ends at a block
        border; with `whole`, even if that wastes the rest of the budget. The first chunk of a step always advances."""
        need = request.num_ready
        if need <= budget:
            return need
        size = self._blocks.block_size
        aligned = (request.num_computed + budget) // size * size - request.num_computed
        return max(0, aligned) if whole or aligned > 0 else budget

    def _fits(self, request: Request, budget: int) -> bool:
        """Whether a waiting prompt would get tokens of a step that has rows and this budget left."""
        size = self._blocks.block_size
        known = max(request.num_computed, len(self._blocks.match(request)) * size)
        return request.num_tokens - known <= budget or (known + budget) // size * size > known

    def _row(self, request: Request, count: int, work: float = inf) -> ScheduledRow:
        """work: of a part, the tokens that would pass the whole model in the time of this step."""
        apart, spent_s = request.apart, 0.0
        if apart is not None and apart.pending:
            count, spent_s = apart.pending, apart.spent_s
        end = request.num_computed + count
        samples = end == request.num_tokens and (request.part is None or request.part.last)
        again = request.state_lag
        row = ScheduledRow(request, request.num_settled, again + count, samples, again=again, spent_s=spent_s)
        if request.part is not None:
            row.layers = request.part.next_layers(count, work)
            row.samples = samples and row.ends
        return row


def _of_batch(request: Request) -> bool:
    """Requests beyond memory have turns of their own (cold_turns.py)."""
    return request.service_class == BATCH.name and request.cold is None


def _above_batch(request: Request) -> bool:
    """Of a higher class; those beyond memory have turns of their own, too."""
    return RANK[request.service_class] < RANK[BATCH.name] and request.cold is None


def _leading(queue: Sequence[Request]) -> Request:
    """The prompt that says how long the step of this queue may take: one of class batch only if there are no others."""
    others = (request for request in queue if not _of_batch(request))
    return queue[0] if queue[0].part is not None else next(others, queue[0])


def _still_running(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """Without rows whose request lost its blocks to a later row."""
    return [row for row in rows if row.request.state is RequestState.RUNNING]

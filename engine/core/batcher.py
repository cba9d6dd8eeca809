"""Token-budget batching: decides which requests compute how many tokens in the next step. Pure.

One rule serves every role. A step has a budget of `max_num_batched_tokens`. Each decode takes one token. A policy
(sched/batching.py) decides how much of the rest prefill may use, and an order (sched/queueing.py) decides which prompts
get it. A prefill node has no decodes, and a decode node has no prompts. The same order decides which request gets a
seat, and which request gives its blocks back when blocks run out (engine/core/seats.py). The named blocks of that
request stay in the prefix cache, so it loses little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from cache.layer_groups import LayerGroups
from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.core.cold_turns import ColdTurns
from engine.core.seats import Seats
from engine.speculation.speculative import Speculator
from engine.step.block_book import BlockBook
from engine.step.cold import Cold
from engine.step.request import Request, RequestState
from engine.step.step import Committed, Named, ScheduledRow, Step
from sched.batching import BatchingPolicy, DecodeFirst, StepLoad
from sched.classes import BATCH, RANK
from sched.queueing import FCFS, QueueOrder
from sched.stretch import Waiting


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How a batcher decides. `speculator` plans drafts; `recompute_s(tokens, context)`: seconds to compute these
    tokens behind `context` others, for eviction. `groups`: of the model's layers; None = one. `beyond_len`: longest
    prompt + output of a request whose KV exceeds the arena (Request.cold); 0 = there are none."""

    prefix_caching: bool = True
    policy: BatchingPolicy = field(default_factory=DecodeFirst)
    order: QueueOrder = field(default_factory=FCFS)
    speculator: Speculator | None = None
    recompute_s: Callable[[int, int], float] = lambda tokens, context: 1.0
    groups: LayerGroups | None = None
    beyond_len: int = 0


class Batcher:
    """Owns every unfinished request of this node and the block references they hold."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        rules: BatchRules | None = None,
    ) -> None:
        rules = rules or BatchRules()
        self.pool = pool
        self.blocks = BlockBook(
            pool, block_size, rules.prefix_caching, rules.recompute_s, rules.groups, max_num_batched_tokens
        )
        self._order = rules.order
        self.seats = Seats(self.blocks, max_num_seqs, self._order)
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._policy = rules.policy
        self._speculator = rules.speculator
        self._in_step: dict[str, Request] = {}
        self._changes = 0
        self._part_ran = False  # in the last step
        self._beyond_len = rules.beyond_len
        self._cold = ColdTurns()

    @property
    def version(self) -> int:
        """Greater after every change of a request. `add` does not count: its request is the last of `requests`."""
        return self._changes + self.blocks.changes

    @property
    def requests(self) -> Mapping[str, Request]:
        """Every unfinished request of this node by id."""
        return self.seats.requests

    @property
    def waiting(self) -> Sequence[Request]:
        return self.seats.waiting

    @property
    def running(self) -> Sequence[Request]:
        return self.seats.running

    @property
    def num_preemptions(self) -> int:
        return self.seats.num_preemptions

    # --- arrivals

    def add(self, now: float, request: Request) -> None:
        """Queue a request whose KV this node will compute."""
        self.seats.check_new(request)
        self._cold.count(request, 1)
        self.seats.wait(now, request)

    def goes_beyond(self, request: Request, cold: Cold) -> None:
        """The KV of a new request exceeds the arena: from now on it counts as class batch. `add` follows."""
        request.cold, request.service_class = cold, BATCH.name

    def reserve(self, now: float, request: Request) -> int:
        """Take blocks for a prompt that another node computes and pushes here.

        Returns n: the prefix cache already holds the first n of `request.block_ids`. Raises OutOfBlocks, also when
        requests ahead of it in the order wait for the free blocks.
        """
        self.seats.check_new(request)
        if self.seats.queue_before(now, request) and not self._has_room(now, request):
            raise OutOfBlocks(f"{request.request_id} is queued behind requests that wait for blocks")
        cached = self.blocks.take_all(request)
        self.seats.requests[request.request_id] = request
        request.looked_up = True
        request.num_cached = cached * self.block_size
        self._changes += 1
        request.move(now, RequestState.REMOTE, cached_tokens=request.num_cached)
        return cached

    def _has_room(self, now: float, request: Request) -> bool:
        """Whether free and cached blocks suffice for it and for all requests that wait for blocks ahead of it."""
        ahead = self.seats.queue_before(now, request)
        return sum(map(self.blocks.lacks, [request, *ahead])) <= self.pool.num_free

    def claim(self, request: Request) -> None:
        """Call it when `reserve` failed. Until `unclaim`, no request behind this one in the order starts with the
        blocks that it needs, and requests of lower classes behind it give their blocks back."""
        self.seats.claims.append(request)

    def claims(self, now: float) -> list[Request]:
        """The claims in order. If one claim cannot reserve its blocks, the later ones are not tried."""
        return self._order.order(now, self.seats.claims)

    def unclaim(self, request: Request) -> None:
        """Call it when the request has its blocks or has ended. Idempotent."""
        if request in self.seats.claims:
            self.seats.claims.remove(request)

    def lift(self, now: float, request: Request) -> bool:
        """Take a request that decodes out of the next steps, because it moves to another node. It keeps its blocks, and
        takes the tokens of the running step. Returns False if it does not decode here."""
        self._changes += 1
        return self.seats.lift(now, request)

    def put_back(self, now: float, request: Request) -> None:
        """A lifted request goes on here."""
        self._changes += 1
        self.seats.put_back(now, request)

    def moved(self, now: float, request: Request) -> None:
        """A lifted request goes on elsewhere. Its named blocks stay in the prefix cache."""
        self._finish(now, request, "moved")

    def in_step(self, request: Request) -> bool:
        """Whether the running step computes it."""
        return request.request_id in self._in_step

    def keep_private(self, request: Request) -> None:
        """No other request may find the KV that it computes from now on."""
        request.private = True

    def delivered(self, request: Request, num_tokens: int) -> list[Named]:
        """The first `num_tokens` tokens of a reserved prompt have arrived with all layers. Returns the full blocks that
        got their names now."""
        self._changes += 1
        request.num_computed = num_tokens
        return self.blocks.name_full(request)

    def goes_on(self, request: Request, token_ids: Sequence[int]) -> None:
        """A reserved request has run on another node since, and has these tokens; `arrived` brings the next one."""
        self._changes += 1
        request.token_ids[:] = token_ids
        request.first_output_index = len(token_ids) + 1 - request.num_prompt_tokens

    def arrived(self, now: float, request: Request, first_token: int, private: bool = False) -> None:
        """The KV and the first token of a reserved prompt have arrived: decode from the next step on. `private`: as
        after keep_private."""
        self._changes += 1
        request.private = private
        request.num_computed = request.num_tokens
        self.blocks.name_full(request)
        request.token_ids.append(first_token)
        request.handed_over = True
        reason = request.stop_reason(self.eos_token_ids, self.max_model_len)
        if reason:
            self._finish(now, request, reason)
            return
        self.seats.wait(now, request)

    # --- prefix loads from lower tiers and other nodes

    def loads(self, now: float, limit: int) -> list[Request]:
        """The next waiting requests whose prefix the node should look up outside this pool, at most `limit` in flight;
        and the next request beyond memory, for which it should find room in the tier.

        They leave the queue until `loaded` puts them back in their place.
        """
        if not self.blocks.prefix_caching and not self._cold.present:
            return []
        waiting = (r for r in self.waiting if r.state is RequestState.WAITING)
        unknown = self._order.order(now, [r for r in waiting if not r.looked_up and not r.scores_prompt])
        chosen: list[Request] = []
        if self._cold.present:
            everyone = {**self.requests, **self._in_step}  # an ended one keeps its room until its step has ended
            chosen = self._cold.next(unknown, everyone.values())
        if self.blocks.prefix_caching:
            room = limit - sum(r.state is RequestState.LOADING and r.cold is None for r in self.waiting)
            chosen = [r for r in unknown if r.cold is None][: max(0, room)] + chosen
        self._changes += len(chosen)
        for request in chosen:
            request.looked_up = True
            request.move(now, RequestState.LOADING)
        return chosen

    def loaded(self, now: float, request: Request) -> None:
        """The load has ended, with or without blocks: `schedule` may choose the request."""
        if not request.finished:
            self._changes += 1
            request.count_cached()
            request.move(now, RequestState.WAITING, cached_tokens=request.num_computed)

    # --- parts of long prompts (engine/pipeline/)

    def begin_part(self, request: Request, start: int, sizes: Sequence[int] = ()) -> None:
        """All stages of the request have the KV of its first `start` tokens, whole blocks; see Part.start."""
        assert request.part is not None
        self._changes += 1
        self.blocks.cut(request, start)
        request.part.start(start, sizes)

    def lost_parts(self) -> list[Request]:
        """Requests with a part whose blocks went to others: what was computed here is gone, so they must end."""
        return [r for r in self.requests.values() if r.part is not None and r.part.lost]

    # --- steps

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run. `commit` must follow before the next call."""
        self._changes += 1
        first = next(iter(self.claims(now)), None)
        if first is not None:
            need = self.blocks.lacks(first) - len(self.blocks.match(first))
            self.seats.make_room(now, first, need + len(self.running))  # each running request may grow by a block
        self._cold.begin(now)
        rows = self._choose(now)
        if not rows and self._cold.wake(now):
            rows = self._choose(now)
        if (
            not rows and self.waiting and not (first is not None and self._has_room(now, first))
        ):  # no request can start in turn: start any that can, which frees what the others wait for
            rows = self._choose(now, in_turn=False)
        self._in_step = {row.request.request_id: row.request for row in rows}
        if not rows:
            return None
        step = Step(rows)
        self._part_ran = step.has_parts
        return step

    def _choose(self, now: float, in_turn: bool = True) -> list[ScheduledRow]:
        """in_turn: a request that lacks seats or blocks keeps later requests in the order from taking them."""
        alone = self._policy.decodes_wait
        prefills = self._prefill(now, [], in_turn) if alone else []
        decodes = [] if prefills else self._decode(now, in_turn)
        if not (alone and (prefills or decodes)):  # the last decode may have lost its blocks and become a prompt
            prefills = self._prefill(now, decodes, in_turn)
        prefills = _still_running(prefills)
        for row in prefills:
            self._served(row.request, row.start + row.num_tokens)
        rows = _still_running(decodes) + prefills
        if self._speculator is not None:
            left = self.max_num_batched_tokens - sum(row.num_tokens for row in rows)
            self._speculator.plan(rows, left, self.blocks)
        if self._cold.present:
            self._cold.cut(rows)
        return sorted(rows, key=lambda row: row.num_tokens > 1)

    def _decode(self, now: float, in_turn: bool) -> list[ScheduledRow]:
        """One token for each running request with a computed prompt, then for requests that only need a seat."""
        rows: list[ScheduledRow] = []
        for request in self._cold.awake(now, [r for r in self.running if r.decodes]):
            if len(rows) >= self.max_num_batched_tokens:
                break
            if request.state is RequestState.RUNNING and request.decodes:  # not preempted in this loop
                self._decode_one(now, request, rows)
        ready = set(self.seats.ready())
        seats = blocks = 0  # which earlier requests in the order wait for
        for request in self.seats.queue(now) if ready else []:
            if len(rows) >= self.max_num_batched_tokens:
                break
            if request not in ready:
                seats += request.request_id in self.requests  # a claim needs no seat yet
                blocks += max(0, self.blocks.lacks(request))
            elif not request.decodes:  # it lost its blocks to an earlier request
                continue
            elif self.seats.may_start(now, request, *((seats, blocks) if in_turn else (0, 0))):
                self.seats.start(now, request, seats if in_turn else 0)
                self._served(request, request.num_tokens)
                self._decode_one(now, request, rows)
            elif in_turn:
                break
        return _still_running(rows)

    def _decode_one(self, now: float, request: Request, rows: list[ScheduledRow]) -> None:
        if self.seats.grow(now, request, 1):
            rows.append(self._row(request, 1))

    def _prefill(self, now: float, decodes: Sequence[ScheduledRow], in_turn: bool) -> list[ScheduledRow]:
        """Chunks of the next prompts, in the same step as `decodes`. A waiting prompt that cannot start keeps later
        prompts from starting, because they would take the blocks or the seat that it waits for. Hand-overs and claims
        do the same. If another prompt is about to compute the next block of a prompt, that other prompt takes its
        place in the step, so the node computes a shared prefix once."""
        prompts = self._cold.awake(now, self.seats.prompts())
        queue, behind = self._turns(self._order.order(now, prompts))
        budget = self._prefill_budget(now, decodes, queue) if queue else 0
        rows: list[ScheduledRow] = []
        taken: set[str] = set()
        by_budget = not self._cold.present
        blocked, first = False, self.seats.first_but_prompts(now) if in_turn else None
        for request in (*queue, *behind):
            if (budget <= 0 and by_budget) or (rows and request in behind):
                break
            if budget <= 0 and request.cold is None:
                continue
            waits = request.state is RequestState.WAITING
            if waits and first is not None and not blocked:
                blocked = self._order.order(now, [request, first])[0] is first
            if waits and (blocked or not self.seats.may_start(now, request)):
                blocked = in_turn
                continue
            if waits and (ahead := self._computing_for(request)) is not None:
                request, waits = ahead, False
            if request.request_id in taken:
                continue
            share = request.share  # the budget bounds time: fewer layers, more tokens
            if request.cold is not None:  # a few layers at a time instead: each chunk reads all that is cold
                count, share = request.num_ready, 0.0
            else:
                count = self._chunk(request, min(int(budget / share), self.max_num_batched_tokens), whole=bool(rows))
            if not count:
                break
            if waits:
                self.seats.start(now, request)
            taken.add(request.request_id)
            if self.seats.grow(now, request, count):
                rows.append(self._row(request, count))
                budget -= ceil(count * share)
        return rows

    def _turns(self, queue: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
        """(prompts of the next step, prompts that get it if none of these can run).

        A part of a long prompt passes the model by itself, so it gains nothing from other prompts in its step, and they
        would wait for it. The two take turns; a higher class does not wait for its turn."""
        parts = [request for request in queue if request.part is not None]
        others = [request for request in queue if request.part is None]
        if not parts or not others:
            return queue, ()
        ranks = [min(RANK[request.service_class] for request in some) for some in (parts, others)]
        parts_first = ranks[0] < ranks[1] if ranks[0] != ranks[1] else not self._part_ran
        return (parts, others) if parts_first else (others, parts)

    def _served(self, request: Request, num_tokens: int) -> None:
        if num_tokens > request.num_served:
            self._order.served(request, num_tokens - request.num_served)
            request.num_served = num_tokens

    def _computing_for(self, request: Request) -> Request | None:
        """The running prompt that will compute the next block of `request`."""
        begun = (other for other in self.running if other.num_uncomputed > 1 and not other.apart)
        return next((other for other in begun if self.blocks.computes_next(request, other)), None)

    def _prefill_budget(self, now: float, decodes: Sequence[ScheduledRow], queue: Sequence[Request]) -> int:
        if self._cold.present:
            decodes = [row for row in decodes if row.request.cold is None]  # others: cold_turns.py
        left = self.max_num_batched_tokens - sum(row.num_tokens for row in decodes)
        context = sum(row.start + row.num_tokens for row in decodes)
        classes = {row.request.service_class for row in decodes}
        prompts = [
            Waiting(r.service_class, now - r.arrival, r.num_uncomputed, r.num_computed) for r in queue if decodes
        ]
        load = StepLoad(left, len(decodes), context, queue[0].num_computed, classes, prompts)
        return min(left, self._policy.prefill_tokens(load))

    def _chunk(self, request: Request, budget: int, whole: bool) -> int:
        """Tokens of `request` for a step with `budget` left. A chunk that does not finish the prompt ends at a block
        border; with `whole`, even if that wastes the rest of the budget. The first chunk of a step always advances."""
        need = request.num_ready
        if need <= budget:
            return need
        aligned = (request.num_computed + budget) // self.block_size * self.block_size - request.num_computed
        return max(0, aligned) if whole or aligned > 0 else budget

    def _row(self, request: Request, count: int) -> ScheduledRow:
        if request.cold is not None and request.cold.pending:
            count = request.cold.pending
        end = request.num_computed + count
        samples = end == request.num_tokens and (request.part is None or request.part.last)
        return ScheduledRow(request, request.num_computed, count, samples)

    def commit(self, now: float, step: Step, tokens: Sequence[Sequence[int] | None]) -> Committed:
        """Account for a step that ran. `tokens[i]` are the tokens of row i, in order: None if the row does not sample,
        one token for a plain row, several if drafts were accepted. Tokens after the end of a request are dropped. Only
        known tokens count as computed, so rejected drafts need no rollback."""
        done = Committed()
        self._changes += 1
        self._in_step = {}
        if self._cold.present:
            self._cold.end(now, step)
        for index, (row, sampled) in enumerate(zip(step.rows, tokens, strict=True)):
            request = row.request
            if request.finished:  # aborted while the step ran; its blocks were kept until now
                self.blocks.release(request)
                continue
            if request.cold is not None:
                if not row.ends:
                    request.cold.passed(row.num_tokens, row.layers.stop if row.layers is not None else 0)
                    continue
                request.cold.passed(0, 0)
            reason, kept = self._append(request, sampled or ()) if row.samples else (None, 0)
            written = row.start + row.num_tokens
            request.num_computed = min(written, request.num_tokens - 1) if row.samples else written
            done.named += self.blocks.name_full(request)
            if request.part is not None and not request.part.last:
                done.passed.append(index)
                reason = "passed" if request.num_computed == request.num_tokens else None
            if reason:
                self._finish(now, request, reason)
            if kept:
                done.emitted.append((request, index, kept))
        return done

    def _append(self, request: Request, tokens: Sequence[int]) -> tuple[str | None, int]:
        """(why the request ends now, how many of `tokens` it takes)."""
        assert tokens, "a sampling row yields at least one token"
        for kept, token in enumerate(tokens, 1):
            request.token_ids.append(token)
            longest = self.max_model_len if request.cold is None else self._beyond_len
            reason = request.stop_reason(self.eos_token_ids, longest)
            if reason:
                return reason, kept
        return None, len(tokens)

    def fail(self, now: float, step: Step) -> list[Request]:
        """Handle a step that raised: it computed nothing, and its requests end. Returns those that were alive."""
        self._in_step = {}
        alive = [row.request for row in step.rows if not row.request.finished]
        for row in step.rows:
            if row.request.finished:
                self.blocks.release(row.request)
            else:
                self._finish(now, row.request, "error")
        return alive

    # --- ends

    def abort(self, now: float, request_id: str) -> Request | None:
        """End a request at any moment. Its blocks become free immediately, or after the running step if the step
        includes it."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(now, request, "abort")
        return request

    def _finish(self, now: float, request: Request, reason: str) -> None:
        self._changes += 1
        self._cold.count(request, -1)
        self.seats.leave(now, request, reason)
        if self._speculator is not None:
            self._speculator.forget(request.request_id)
        if request.request_id not in self._in_step:
            self.blocks.release(request)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per request reference, also those of requests that ended during the running step."""
        ended = (request for request in self._in_step.values() if request.finished)
        return (block_id for request in (*self.requests.values(), *ended) for block_id in request.held_blocks)

    def check_integrity(self) -> None:
        """Every reference in the pool belongs to a request here or a transfer. Raises IntegrityError."""
        self.pool.check_integrity()


def _still_running(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """Without rows whose request lost its blocks to a later row."""
    return [row for row in rows if row.request.state is RequestState.RUNNING]

"""Token-budget batching: the requests of a node from their arrival to their end, and its steps one after another. Pure.

One rule serves every role. A step has a budget of `max_num_batched_tokens`, which step_planner.py hands out. A prefill
node has no decodes, and a decode node has no prompts. One order (sched/queueing.py) decides which prompts get the
budget, which request gets a seat, and which request gives its blocks back when blocks run out (engine/core/seats.py).
The named blocks of that request stay in the prefix cache, so it loses little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cache.layer_groups import LayerGroups
from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.core.cold_turns import ColdTurns
from engine.core.seats import Seats
from engine.core.step_planner import StepPlanner
from engine.speculation.speculative import Speculator
from engine.step.block_book import BlockBook
from engine.step.cold import Cold
from engine.step.request import Request, RequestState
from engine.step.step import Committed, Named, Step
from sched.batching import BatchingPolicy, DecodeFirst
from sched.classes import BATCH
from sched.queueing import FCFS, QueueOrder


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How a batcher decides. `speculator` plans drafts; `recompute_s(tokens, context)`: seconds to compute these
    tokens behind `context` others, for eviction. `groups`: of the model's layers; None = one. `state_interval`: blocks
    between two saved states of a prompt; 0 = only at ends. `beyond_len`: longest prompt + output of a request whose KV
    exceeds the arena (Request.cold); 0 = there are none."""

    prefix_caching: bool = True
    policy: BatchingPolicy = field(default_factory=DecodeFirst)
    order: QueueOrder = field(default_factory=FCFS)
    speculator: Speculator | None = None
    recompute_s: Callable[[int, int], float] = lambda tokens, context: 1.0
    groups: LayerGroups | None = None
    state_interval: int = 0
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
            pool,
            block_size,
            rules.prefix_caching,
            rules.recompute_s,
            rules.groups,
            max_num_batched_tokens,
            rules.state_interval,
        )
        self._order = rules.order
        self.seats = Seats(self.blocks, max_num_seqs, self._order)
        self._cold = ColdTurns()
        self._planner = StepPlanner(
            self.seats, self._order, rules.policy, rules.speculator, max_num_batched_tokens, self._cold
        )
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._speculator = rules.speculator
        self._in_step: dict[str, Request] = {}
        self._changes = 0
        self._beyond_len = rules.beyond_len

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

    def fits(self, request: Request) -> bool:
        """Whether its tokens are within this node's context."""
        return request.num_tokens <= self.max_model_len

    def decodes_on(self, request: Request) -> bool:
        """Whether it can have another token here behind the first one, which a prefill node makes."""
        over = request.num_output_tokens + 1 >= request.sampling.max_tokens  # it ends on the prefill node
        return over or request.num_tokens + 1 < self.max_model_len

    def arrived(self, now: float, request: Request, first_token: int, private: bool = False) -> str | None:
        """The KV and the first token of a reserved prompt have arrived: decode from the next step on. `private`: as
        after keep_private. Returns why the request ends here instead, without a token of this node; None if it
        decodes."""
        self._changes += 1
        request.private = private
        request.num_computed = request.num_tokens
        self.blocks.name_full(request)
        request.token_ids.append(first_token)
        request.handed_over = True
        reason = request.stop_reason(self.eos_token_ids, self.max_model_len)
        if reason:
            self._finish(now, request, reason)
        else:
            self.seats.wait(now, request)
        return reason

    # --- prefix loads from lower tiers and other nodes

    def loads(self, now: float, limit: int) -> list[Request]:
        """The next waiting requests whose prefix the node should look up outside this pool, at most `limit` in flight;
        and the next request beyond memory, for which it should find room in the tier.

        They leave the queue until `loaded` puts them back in their place.
        """
        if not self.blocks.prefix_caching and not self._cold.present:
            return []
        room = limit - sum(r.state is RequestState.LOADING and r.cold is None for r in self.waiting)
        if room <= 0 and not self._cold.present:
            return []
        waiting = (r for r in self.waiting if r.state is RequestState.WAITING)
        unknown = self._order.order(now, [r for r in waiting if not r.looked_up and not r.scores_prompt])
        chosen: list[Request] = []
        if self._cold.present:
            everyone = {**self.requests, **self._in_step}  # an ended one keeps its room until its step has ended
            chosen = self._cold.next(unknown, everyone.values())
        if self.blocks.prefix_caching:
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

    # --- parts of long prompts (engine/prefill_group/)

    def begin_part(self, request: Request, start: int, sizes: Sequence[int] = ()) -> None:
        """All nodes of the request have the KV of its first `start` tokens, whole blocks; see Part.start."""
        assert request.part is not None
        self._changes += 1
        self.blocks.cut(request, start)
        request.part.start(start, sizes)

    def skip_to(self, request: Request, num_tokens: int) -> None:
        """Other nodes compute the tokens before `num_tokens`, and their KV arrives: the next step of this request
        computes the tokens behind them. Not while a step computes it."""
        assert request.part is not None and not self.in_step(request)
        self._changes += 1
        request.num_computed = num_tokens

    def stuck(self) -> list[tuple[Request, str]]:
        """Requests that must end because of blocks, each with the reason."""
        parts = [(r, r.part.lost) for r in self.requests.values() if r.part is not None and r.part.lost]
        return [*parts, *self.seats.shut_out()]

    # --- steps

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run. `commit`, `fail` or `gave_way` must follow before the next
        call."""
        self._changes += 1
        first = next(iter(self.claims(now)), None)
        if first is not None:
            need = self.blocks.lacks(first) - len(self.blocks.match(first))
            self.seats.make_room(now, first, need + len(self.running))  # each running request may grow by a block
        self._cold.begin(now)
        rows = self._planner.rows(now)
        if not rows and self._cold.wake(now):
            rows = self._planner.rows(now)
        if (
            not rows and self.waiting and not (first is not None and self._has_room(now, first))
        ):  # no request can start in turn: start any that can, which frees what the others wait for
            rows = self._planner.rows(now, in_turn=False)
        self.seats.give_way(now)
        self._in_step = {row.request.request_id: row.request for row in rows}
        return Step(rows, self._planner.gives_way, self._planner.left_out) if rows else None

    def lets_in_at(self) -> float:
        """When the last step has to let others in; see StepPlanner.lets_in_at."""
        return self._planner.lets_in_at()

    def commit(self, now: float, step: Step, tokens: Sequence[Sequence[int] | None]) -> Committed:
        """Account for a step that ran. `tokens[i]` are the tokens of row i, in order: None if the row does not sample,
        one token for a plain row, several if drafts were accepted. Tokens after the end of a request are dropped. Only
        known tokens count as computed, so rejected drafts need no rollback: a step leaves states behind the last token
        that was known, and the next one computes accepted drafts again."""
        done = Committed()
        self._changes += 1
        self._in_step = {}
        self._planner.ended(now)
        if self._cold.present:
            self._cold.end(now, step)
        for index, (row, sampled) in enumerate(zip(step.rows, tokens, strict=True)):
            request = row.request
            if request.finished:  # aborted while the step ran; its blocks were kept until now
                self.blocks.release(request)
                continue
            if (apart := request.apart) is not None:
                if not row.ends:
                    assert row.layers is not None
                    apart.passed(row.num_tokens, row.layers.stop)
                    continue
                apart.passed(0, 0)
            reason, kept = self._append(request, sampled or ()) if row.samples else (None, 0)
            written = row.start + row.num_tokens
            request.num_computed = min(written, request.num_tokens - 1) if row.samples else written
            self.blocks.settle(request, written - row.num_drafts)
            done.named += self.blocks.name_full(request)
            if request.part is not None and not request.part.last:
                done.passed.append(index)
                reason = "passed" if request.num_computed == request.part.stop(request.num_tokens) else None
            if reason:
                done.named += self.blocks.name_last_state(request)
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

    def gave_way(self, now: float, step: Step) -> None:
        """Handle a step that ended between two layers: what it computed is lost, and later steps compute it again."""
        self._changes += 1
        self._in_step = {}
        self._planner.ended(now, gave_way=True)
        for row in step.rows:
            if row.request.finished:
                self.blocks.release(row.request)

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
        """Every block of the pool is free, cached or held, and every request has what its next token needs, in every
        group. Raises IntegrityError."""
        self.pool.check_integrity()
        for request in self.requests.values():
            self.blocks.check_tables(request)

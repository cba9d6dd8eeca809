"""Token-budget batching: which requests compute how many tokens in the next step. Pure.

One idea serves every role: a step has a budget of `max_num_batched_tokens`, decodes take one token each, what is left
goes to prefill chunks, oldest first (decode-first mixing as in Sarathi-Serve, section 4). A prefill node simply has no
decodes, a decode node no prompts. When blocks run out the newest running request gives its blocks back and waits
again; its named blocks stay in the prefix cache, so little is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.pool import BlockPool, OutOfBlocks
from engine.request import Request, RequestState


@dataclass(slots=True)
class ScheduledRow:
    """`num_tokens` tokens of `request`, from position `start` on, are computed in this step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the last known token is among them, so the step yields the next one


@dataclass(slots=True)
class Step:
    rows: list[ScheduledRow]  # decodes (one token) first

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class Committed:
    """What a finished step changed."""

    emitted: list[tuple[Request, int]] = field(default_factory=list)  # (request, index into the step's rows)
    named: list[tuple[BlockKey, int]] = field(default_factory=list)  # blocks that became full: (key, block id)


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
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefix_caching = prefix_caching
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._in_step: set[str] = set()

    # --- arrivals

    def add(self, now: float, request: Request) -> None:
        """Queue a request whose KV is to be computed here."""
        self._own(request)
        request.move(now, RequestState.WAITING)
        self.waiting.append(request)

    def reserve(self, now: float, request: Request) -> int:
        """Take blocks for a prompt that another node computes and pushes here.

        The first n of `request.block_ids` are already here from the prefix cache; returns n. Raises OutOfBlocks.
        """
        matched = self._match(request)
        self.pool.acquire(matched)
        try:
            fresh = self.pool.allocate(self._blocks_for(request.num_tokens) - len(matched))
        except OutOfBlocks:
            self.pool.release(matched)
            raise
        self._own(request)
        request.block_ids = matched + fresh
        request.num_named = len(matched)
        request.looked_up = True
        request.num_cached = len(matched) * self.block_size
        request.move(now, RequestState.REMOTE, cached_tokens=request.num_cached)
        return len(matched)

    def arrived(self, now: float, request: Request, first_token: int) -> None:
        """The KV of a reserved prompt is here and its first token is known: decode from the next step on."""
        request.num_computed = request.num_tokens
        self._name_full_blocks(request)
        request.token_ids.append(first_token)
        request.handed_over = True
        if self._finish_if_done(now, request):
            return
        request.move(now, RequestState.WAITING)
        self.waiting.appendleft(request)

    def _own(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already running here")
        self.requests[request.request_id] = request

    # --- prefix loads from lower tiers and other nodes

    def loads(self, now: float, limit: int) -> list[Request]:
        """The next waiting requests whose prefix should be looked up beyond this pool, `limit` in flight at most.

        They leave the queue until `loaded` puts them back where they were.
        """
        if not self.prefix_caching:
            return []
        room = limit - sum(r.state is RequestState.LOADING for r in self.waiting)
        chosen = [r for r in self.waiting if r.state is RequestState.WAITING and not r.looked_up][: max(0, room)]
        for request in chosen:
            request.looked_up = True
            request.move(now, RequestState.LOADING)
        return chosen

    def adopt_prefix(self, request: Request) -> int:
        """Take references on the longest prefix in this pool; returns its blocks. Idempotent while unscheduled."""
        if not request.block_ids and self.prefix_caching:
            request.block_ids = self._match(request)
            self.pool.acquire(request.block_ids)
            request.num_computed = len(request.block_ids) * self.block_size
            request.num_named = len(request.block_ids)
        return len(request.block_ids)

    def adopt_loaded(self, request: Request, block_ids: Sequence[int]) -> None:
        """Append blocks that hold the next part of the prefix; the request takes over their references."""
        request.block_ids.extend(block_ids)
        request.num_computed = len(request.block_ids) * self.block_size
        self._name_full_blocks(request)

    def loaded(self, now: float, request: Request) -> None:
        """The load has ended, with or without blocks: the request may be scheduled."""
        if not request.finished:
            self._count_cached(request)
            request.move(now, RequestState.WAITING, cached_tokens=request.num_computed)

    # --- steps

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run. `commit` must follow before the next call."""
        budget = self.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        decodes = [r for r in self.running if r.num_tokens - r.num_computed == 1]
        prefills = [r for r in self.running if r.num_tokens - r.num_computed > 1]
        for request in decodes + prefills:
            if request.state is not RequestState.RUNNING:  # preempted for an older one
                continue
            count = self._chunk(request, budget)
            if count and self._grow(now, request, count):
                rows.append(self._row(request, count))
                budget -= count
        rows = [row for row in rows if row.request.state is RequestState.RUNNING]
        rows += self._admit(now, budget)
        rows.sort(key=lambda row: row.num_tokens > 1)
        self._in_step = {row.request.request_id for row in rows}
        return Step(rows) if rows else None

    def _admit(self, now: float, budget: int) -> Iterable[ScheduledRow]:
        """Start waiting requests, oldest first; a loading one is passed over, a too big one blocks those behind."""
        rows = []
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                break
            if request.state is RequestState.LOADING:
                continue
            if self.adopt_prefix(request):
                self._count_cached(request)
            if not self._fits(request) and not self.running:
                self._give_back_waiting(request)
            if not self._fits(request):
                break
            count = self._chunk(request, budget)
            if not count:
                break
            self._extend_blocks(request, count)
            self.waiting.remove(request)
            self.running.append(request)
            request.move(now, RequestState.RUNNING, computed=request.num_computed)
            rows.append(self._row(request, count))
            budget -= count
        return rows

    def _fits(self, request: Request) -> bool:
        return self._blocks_for(request.num_tokens) - len(request.block_ids) <= self.pool.num_free

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of `request` for a step with `budget` left; an unfinished chunk ends at a block border if it can."""
        need = request.num_tokens - request.num_computed
        if need <= budget:
            return need
        aligned = (request.num_computed + budget) // self.block_size * self.block_size - request.num_computed
        return aligned if aligned > 0 else budget

    def _row(self, request: Request, count: int) -> ScheduledRow:
        end = request.num_computed + count
        return ScheduledRow(request, request.num_computed, count, samples=end == request.num_tokens)

    def _extend_blocks(self, request: Request, count: int) -> None:
        need = self._blocks_for(request.num_computed + count) - len(request.block_ids)
        if need > 0:
            request.block_ids += self.pool.allocate(need)

    def _grow(self, now: float, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, preempting newer requests; False when `request` itself had to go."""
        while True:
            try:
                self._extend_blocks(request, count)
                return True
            except OutOfBlocks:
                victim = max(self.running, key=lambda r: r.arrival)
                self._preempt(now, victim)
                if victim is request:
                    return False

    def _preempt(self, now: float, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.looked_up = False
        request.move(now, RequestState.WAITING, preempted=True)
        self.waiting.appendleft(request)

    def _give_back_waiting(self, head: Request) -> None:
        """Nothing runs and the oldest does not fit: queued requests behind it may not sit on blocks."""
        for request in self.waiting:
            if request is not head and request.state is RequestState.WAITING and request.block_ids:
                self._release(request)
                request.looked_up = False

    def commit(self, now: float, step: Step, tokens: Sequence[int | None]) -> Committed:
        """Account for a step that ran; `tokens[i]` is what row i sampled (None where it does not sample)."""
        done = Committed()
        self._in_step = set()
        for index, (row, token) in enumerate(zip(step.rows, tokens, strict=True)):
            request = row.request
            if request.finished:  # aborted while the step ran; its blocks were kept until now
                self._release(request)
                continue
            request.num_computed = row.start + row.num_tokens
            done.named += self._name_full_blocks(request)
            if row.samples:
                assert token is not None
                request.token_ids.append(token)
                self._finish_if_done(now, request)
                done.emitted.append((request, index))
        return done

    def fail(self, now: float, step: Step) -> list[Request]:
        """A step that raised computed nothing: its requests end here. Returns those that were still alive."""
        self._in_step = set()
        alive = [row.request for row in step.rows if not row.request.finished]
        for row in step.rows:
            if row.request.finished:
                self._release(row.request)
            else:
                self._finish(now, row.request, "error")
        return alive

    def _finish_if_done(self, now: float, request: Request) -> bool:
        reason = self._stop_reason(request)
        if reason:
            self._finish(now, request, reason)
        return reason is not None

    def _stop_reason(self, request: Request) -> str | None:
        params, count, last = request.sampling, request.num_output_tokens, request.token_ids[-1]
        if count >= params.min_tokens and (
            last in params.stop_token_ids or (last in self.eos_token_ids and not params.ignore_eos)
        ):
            return "stop"
        if count >= params.max_tokens or request.num_tokens >= self.max_model_len:
            return "length"
        return "handover" if request.handover else None

    # --- ends

    def abort(self, now: float, request_id: str) -> Request | None:
        """End a request at any moment; its blocks are free at once, or when the running step is over."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(now, request, "abort")
        return request

    def _finish(self, now: float, request: Request, reason: str) -> None:
        in_step = request.request_id in self._in_step
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.finish_reason = reason
        request.move(now, RequestState.FINISHED, reason=reason)
        if not in_step:
            self._release(request)

    # --- blocks

    def _count_cached(self, request: Request) -> None:
        """What the first start found is reuse; what a preempted request finds again is its own work."""
        if not request.num_preemptions and not request.handed_over:
            request.num_cached = min(request.num_computed, request.num_prompt_tokens)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _match(self, request: Request) -> list[int]:
        """Longest prefix in the pool. The last known token is never taken from it: its logits are needed."""
        if not self.prefix_caching:
            return []
        keys = request.block_keys(self.block_size)
        return self.pool.match(keys[: (request.num_tokens - 1) // self.block_size])

    def _name_full_blocks(self, request: Request) -> list[tuple[BlockKey, int]]:
        """Name the blocks that became full, so that they can be reused; returns (key, block id) of those that were
        not known under another block."""
        full = request.num_computed // self.block_size
        if not self.prefix_caching or full <= request.num_named:
            return []
        keys = request.block_keys(self.block_size)
        full_blocks = [(keys[i], request.block_ids[i]) for i in range(request.num_named, full)]
        request.num_named = full
        return [(key, block_id) for key, block_id in full_blocks if self.pool.name(block_id, key)]

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_named = 0

    def check_integrity(self) -> None:
        """Every reference in the pool belongs to a request here or a transfer. Raises IntegrityError."""
        self.pool.check_integrity()

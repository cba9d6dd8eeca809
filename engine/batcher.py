"""Token-budget batching: which requests compute how many tokens in the next step. Pure.

One idea serves every role: a step has a budget of `max_num_batched_tokens`, decodes take one token each, what is left
goes to prefill chunks, oldest first (decode-first mixing as in Sarathi-Serve, section 4). A prefill node simply has no
decodes, a decode node no prompts. When blocks run out the newest running request gives its blocks back and waits
again; its named blocks stay in the prefix cache, so little is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from cache.pool import BlockPool, OutOfBlocks
from engine.block_book import BlockBook
from engine.request import Request, RequestState
from engine.step import Committed, ScheduledRow, Step


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
        self.blocks = BlockBook(pool, block_size, prefix_caching)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._in_step: set[str] = set()

    # --- arrivals

    def add(self, now: float, request: Request) -> None:
        """Queue a request whose KV is to be computed here."""
        self._check_new(request)
        self.requests[request.request_id] = request
        request.move(now, RequestState.WAITING)
        self.waiting.append(request)

    def reserve(self, now: float, request: Request) -> int:
        """Take blocks for a prompt that another node computes and pushes here.

        The first n of `request.block_ids` are already here from the prefix cache; returns n. Raises OutOfBlocks.
        """
        self._check_new(request)
        cached = self.blocks.take_all(request)
        self.requests[request.request_id] = request
        request.looked_up = True
        request.num_cached = cached * self.block_size
        request.move(now, RequestState.REMOTE, cached_tokens=request.num_cached)
        return cached

    def arrived(self, now: float, request: Request, first_token: int) -> None:
        """The KV of a reserved prompt is here and its first token is known: decode from the next step on."""
        request.num_computed = request.num_tokens
        self.blocks.name_full(request)
        request.token_ids.append(first_token)
        request.handed_over = True
        reason = request.stop_reason(self.eos_token_ids, self.max_model_len)
        if reason:
            self._finish(now, request, reason)
            return
        request.move(now, RequestState.WAITING)
        self.waiting.appendleft(request)

    def _check_new(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already running here")

    # --- prefix loads from lower tiers and other nodes

    def loads(self, now: float, limit: int) -> list[Request]:
        """The next waiting requests whose prefix should be looked up beyond this pool, `limit` in flight at most.

        They leave the queue until `loaded` puts them back where they were.
        """
        if not self.blocks.prefix_caching:
            return []
        room = limit - sum(r.state is RequestState.LOADING for r in self.waiting)
        chosen = [r for r in self.waiting if r.state is RequestState.WAITING and not r.looked_up][: max(0, room)]
        for request in chosen:
            request.looked_up = True
            request.move(now, RequestState.LOADING)
        return chosen

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
            if self.blocks.adopt_prefix(request):
                self._count_cached(request)
            if not self.blocks.fits(request) and not self.running:
                self._give_back_waiting(request)
            if not self.blocks.fits(request):
                break
            count = self._chunk(request, budget)
            if not count:
                break
            self.blocks.extend(request, count)
            self.waiting.remove(request)
            self.running.append(request)
            request.move(now, RequestState.RUNNING, computed=request.num_computed)
            rows.append(self._row(request, count))
            budget -= count
        return rows

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

    def _grow(self, now: float, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, preempting newer requests; False when `request` itself had to go."""
        while True:
            try:
                self.blocks.extend(request, count)
                return True
            except OutOfBlocks:
                victim = max(self.running, key=lambda r: r.arrival)
                self._preempt(now, victim)
                if victim is request:
                    return False

    def _preempt(self, now: float, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.looked_up = False
        request.move(now, RequestState.WAITING, preempted=True)
        self.waiting.appendleft(request)

    def _give_back_waiting(self, head: Request) -> None:
        """Nothing runs and the oldest does not fit: queued requests behind it may not sit on blocks."""
        for request in self.waiting:
            if request is not head and request.state is RequestState.WAITING and request.block_ids:
                self.blocks.release(request)
                request.looked_up = False

    def commit(self, now: float, step: Step, tokens: Sequence[Sequence[int] | None]) -> Committed:
        """Account for a step that ran. `tokens[i]` are the tokens that row i yielded, in order: None where it does
        not sample, one for a plain row, several when drafts were accepted. What follows the end of a request is
        dropped. KV counts as computed only for known tokens, so that rejected drafts roll back by themselves."""
        done = Committed()
        self._in_step = set()
        for index, (row, sampled) in enumerate(zip(step.rows, tokens, strict=True)):
            request = row.request
            if request.finished:  # aborted while the step ran; its blocks were kept until now
                self.blocks.release(request)
                continue
            reason, kept = self._append(request, sampled or ()) if row.samples else (None, 0)
            written = row.start + row.num_tokens
            request.num_computed = min(written, request.num_tokens - 1) if row.samples else written
            done.named += self.blocks.name_full(request)
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
            reason = request.stop_reason(self.eos_token_ids, self.max_model_len)
            if reason:
                return reason, kept
        return None, len(tokens)

    def fail(self, now: float, step: Step) -> list[Request]:
        """A step that raised computed nothing: its requests end here. Returns those that were still alive."""
        self._in_step = set()
        alive = [row.request for row in step.rows if not row.request.finished]
        for row in step.rows:
            if row.request.finished:
                self.blocks.release(row.request)
            else:
                self._finish(now, row.request, "error")
        return alive

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
            self.blocks.release(request)

    # --- blocks

    def _count_cached(self, request: Request) -> None:
        """What the first start found is reuse; what a preempted request finds again is its own work."""
        if not request.num_preemptions and not request.handed_over:
            request.num_cached = min(request.num_computed, request.num_prompt_tokens)

    def check_integrity(self) -> None:
        """Every reference in the pool belongs to a request here or a transfer. Raises IntegrityError."""
        self.pool.check_integrity()

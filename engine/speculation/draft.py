"""The draft model: a small model of the same vocabulary proposes tokens, and the target verifies them in one step.

It keeps separate KV in a small pool with its own block geometry. On a decode node, whose KV of the prompt comes from a
prefill node, it computes its own KV of the prompt. It does so after the request has begun to decode, in chunks of
CATCH_UP_TOKENS per step of the engine; it drafts for a request when this KV is complete. If the pool is full, it drops
KV of requests outside of this step, least recently used first, and computes it again when needed. If the room still
does not suffice, it makes no draft.

After a step, the KV of accepted draft tokens stays valid; `_State.rewind` compares tokens to find them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled
from engine.step.request import Request
from engine.step.runner import Row, Runner
from engine.step.step import ScheduledRow

CATCH_UP_TOKENS = 256
"""Prompt tokens of all requests that the draft model computes per step of the engine. This bounds the delay that a long
prompt adds to other requests' tokens."""

SAMPLE_WEIGHT = 0.2
"""Weight of one measurement in the moving average of a draft step's time."""


@dataclass(slots=True)
class _State:
    """The draft model's side of one request."""

    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_known: int = 0  # the request's tokens at its last draft
    draft: list[int] = field(default_factory=list)  # that draft
    proposals: list[Tensor] = field(default_factory=list)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Drop KV of rejected draft tokens; the last known token is always computed again."""
        new = tokens[self.num_known :]
        agree = next((j for j, (a, b) in enumerate(zip(self.draft, new, strict=False)) if a != b), len(self.draft))
        self.num_computed = min(self.num_computed, self.num_known + agree, len(tokens) - 1)
        self.num_known, self.draft, self.proposals = len(tokens), [], []


class DraftModel:
    """`propose` runs in the engine thread; `forget` and all other methods run on the event loop."""

    def __init__(self, runner: Runner, rejection: bool) -> None:
        """runner: of the draft model, with a separate pool. rejection: return the distributions of draft tokens for the
        rejection rule; otherwise drafts are judged by equality (engine/speculation/speculative.py)."""
        self._runner = runner
        self._rejection = rejection
        self._size = runner.block_size
        self.pool = BlockPool(len(runner.kv_pool))
        self.step_seconds = 0.0  # of one draft token for all rows, moving average; 0: not measured yet
        self.prompt_tokens = 0  # of prompts, whose KV was computed here
        self._states: OrderedDict[str, _State] = OrderedDict()  # least recently used first
        self._ended: deque[str] = deque()
        self._lock = threading.Lock()

    @property
    def max_tokens(self) -> int:
        """The draft model's maximum text length."""
        return int(self._runner.model.config.max_position_embeddings)

    # --- ends

    def forget(self, request_id: str) -> None:
        """The request has ended: free its blocks immediately, or when the running `propose` ends."""
        self._ended.append(request_id)
        self._drain()

    def _drain(self) -> None:
        """Every holder of the lock calls this after releasing it, so that no end is missed."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._drop(self._ended.popleft())
            finally:
                self._lock.release()

    def _drop(self, request_id: str) -> None:
        if (state := self._states.pop(request_id, None)) is not None:
            self.pool.release(state.block_ids)

    # --- drafts

    def propose(self, rows: Sequence[ScheduledRow], eos_ids: tuple[int, ...]) -> Mapping[str, Sequence[Tensor]]:
        """Fill the drafts of the rows that want some, possibly with fewer tokens. For the rejection rule, returns the
        distribution of each draft token by request id; greedy requests need none."""
        wanting = [row for row in rows if row.num_drafts]
        if not wanting:
            return {}
        with self._lock:
            # Checked under the lock: a request that ends later is dropped when `propose` ends.
            alive = [row for row in wanting if not row.request.finished]
            ready = self._catch_up(alive, {row.request.request_id for row in rows}, eos_ids)
            self._go_on(ready, eos_ids)
            states = {row.request.request_id: self._states.get(row.request.request_id) for row in wanting}
        for row in wanting:
            state = states[row.request.request_id]
            row.set_draft(list(state.draft) if state else [])
        self._drain()
        return {name: state.proposals for name, state in states.items() if state and state.proposals}

    def _catch_up(self, rows: Sequence[ScheduledRow], busy: set[str], eos_ids: tuple[int, ...]) -> list[ScheduledRow]:
        """Compute KV of known tokens, and the first draft token of each row with complete KV; returns those rows."""
        batch: list[Row] = []
        behind: list[tuple[ScheduledRow, _State, int]] = []
        left = CATCH_UP_TOKENS
        for row in sorted(rows, key=lambda row: row.request.num_tokens - self._of(row.request).num_computed):
            request, state = row.request, self._of(row.request)
            state.rewind(request.token_ids)
            count = min(request.num_tokens - state.num_computed, left)
            if count <= 0 or not self._room(request.request_id, request.num_tokens + row.num_drafts, busy):
                continue
            complete = state.num_computed + count == request.num_tokens
            tokens = request.token_ids[state.num_computed : state.num_computed + count]
            sample = self._sampling(request, state, eos_ids) if complete else None
            batch.append(Row(tokens, state.num_computed, state.block_ids, sample))
            behind.append((row, state, count))
            left -= count
        chosen = self._runner.step(batch)
        ready = []
        for (row, state, count), tokens_of_row in zip(behind, chosen, strict=True):
            before = min(state.num_computed, row.request.num_prompt_tokens)
            state.num_computed += count
            self.prompt_tokens += min(state.num_computed, row.request.num_prompt_tokens) - before
            if tokens_of_row:
                self._keep(state, tokens_of_row[0])
                ready.append(row)
        return ready

    def _go_on(self, rows: Sequence[ScheduledRow], eos_ids: tuple[int, ...]) -> None:
        """The other draft tokens, one step of the draft model each."""
        while rows := [row for row in rows if len(self._of(row.request).draft) < row.num_drafts]:
            begin = time.perf_counter()
            states = [self._of(row.request) for row in rows]
            chosen = self._runner.step(
                [
                    Row(s.draft[-1:], s.num_computed, s.block_ids, self._sampling(row.request, s, eos_ids))
                    for row, s in zip(rows, states, strict=True)
                ]
            )
            for state, (token,) in zip(states, chosen, strict=True):
                state.num_computed += 1
                self._keep(state, token)
            took = time.perf_counter() - begin
            self.step_seconds += (took - self.step_seconds) * (SAMPLE_WEIGHT if self.step_seconds else 1.0)

    def _keep(self, state: _State, token: Sampled) -> None:
        state.draft.append(token.token_id)
        if token.probabilities is not None:
            state.proposals.append(token.probabilities)

    def _of(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            # Log probabilities and grammar apply only to the target: it rejects tokens that the grammar forbids.
            params = replace(request.sampling, logprobs=None, grammar="")
            state = self._states[request.request_id] = _State(params)
        self._states.move_to_end(request.request_id)
        return state

    def _sampling(self, request: Request, state: _State, eos_ids: tuple[int, ...]) -> SamplingRow:
        return SamplingRow(
            state.params,
            request.token_ids,
            request.num_prompt_tokens,
            eos_ids=eos_ids,
            draft=tuple(state.draft),
            wants_probabilities=self._rejection,
        )

    def _room(self, request_id: str, num_tokens: int, busy: set[str]) -> bool:
        """Reserve blocks for `num_tokens` tokens of the request; False if even the blocks of idle requests are too
        few."""
        state = self._states[request_id]
        need = -(-num_tokens // self._size) - len(state.block_ids)
        if need <= 0:
            return True
        idle = [name for name in self._states if name not in busy]
        while need > self.pool.num_free and idle:
            self._drop(idle.pop(0))
        try:
            state.block_ids += self.pool.allocate(need)
        except OutOfBlocks:
            return False
        return True

    def state(self) -> dict[str, object]:
        """For /debug/state; the counts may be from the middle of a step."""
        return {
            "blocks": self.pool.usage(),
            "requests": len(self._states),
            "step_ms": 1000 * self.step_seconds,
            "prompt_tokens": self.prompt_tokens,
        }

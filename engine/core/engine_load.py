"""The load of this node's engine, as gossip, load words and probes report it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from cache.block import BlockKey
from engine.config.config import Config
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.step.request import Request, RequestState
from sched.classes import CLASSES
from sched.gossip.intents import claimed_depths
from sched.gossip.load_word import CHANGING, DRAINING, ROLE_BITS, STAGES, LoadWord
from sched.gossip.record import NodeRecord
from sched.rejection import OutputLengths, running_soon
from sched.role_change import BOTH

SOON_S = 1.0
"""Horizon of the record's predictions, seconds."""


COMPARED_PROMPTS = 64
"""Number of queued prompts that are compared for shared prefixes."""


def first_role(config: Config) -> frozenset[str]:
    """The roles for which a node takes new requests when it starts."""
    can = BOTH & set(config.roles)
    return can if can < BOTH or config.first_role == "both" else frozenset({config.first_role})


@dataclass(slots=True)
class Counted:
    """Sums over a node's requests, for its load."""

    requests: int = 0  # how many of the batcher's requests are in the sums
    waiting: Counter[str] = field(default_factory=Counter)  # for blocks, a seat, a prefix or KV, by class
    made: list[int] = field(default_factory=list)  # output tokens of each running request that decodes here
    running_tokens: int = 0  # known tokens of the running requests
    arriving: int = 0  # requests that do not run yet and will decode here
    begun: int = 0  # requests that hold blocks
    queued: int = 0  # requests with prefill left here
    queued_tokens: int = 0
    left: tuple[float, float, float] = (0.0, 0.0, 0.0)  # prefill_features of the work that is left
    prefixes: set[BlockKey] = field(default_factory=set)  # keys of the first COMPARED_PROMPTS of them


def _by_class(counted: Counted) -> dict[str, int]:
    return {name: counted.waiting[name] for name in CLASSES}


Complete = Callable[[NodeRecord], NodeRecord]


def _as_it_is(record: NodeRecord) -> NodeRecord:
    return record


class EngineLoad:
    """Computes the load from the batcher's requests."""

    def __init__(
        self,
        config: Config,
        batcher: Batcher,
        costs: StepCosts,
        complete: Complete = _as_it_is,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """complete: adds to a record the facts that the node has outside its engine. clock: that of the steps."""
        self.lengths = OutputLengths()
        self.does = first_role(config)  # the roles for which it takes new requests (engine/scaling/role_changes.py)
        self.draining = False
        self.stages = False  # whether this node can compute a part of a prompt (Runner.why_whole)
        self._complete, self._clock = complete, clock
        self._config = config
        self._batcher = batcher
        self._costs = costs
        fixed, most = config.batching_policy == "mixed", config.max_num_batched_tokens
        self._chunk_tokens = min(most, config.prefill_chunk_tokens) if fixed else most
        self._counted, self._version = Counted(), batcher.version

    def record(self) -> NodeRecord:
        """The record for gossip."""
        return self._record(self._count())

    def word(self) -> LoadWord:
        """The part of the record that peers read one-sided."""
        counted = self._count()
        record = self._record(counted)
        return LoadWord.of(record, _by_class(counted), record.flags)

    def _record(self, counted: Counted) -> NodeRecord:
        usage, soon, running = self._batcher.pool.usage(), self._soon(counted, SOON_S), len(self._batcher.running)
        a0, a1, a2 = self._costs.prompt_coefficients
        each = self._config.pooled_per_block  # nodes count each other's memory in blocks of the pool
        record = NodeRecord(
            running=running,
            running_soon=soon,
            waiting=counted.waiting.total(),
            waiting_interactive=counted.waiting["interactive"],
            waiting_batch=counted.waiting["batch"],
            max_running=self._config.max_num_seqs,
            queued_tokens=counted.queued_tokens,
            blocks_used=each * usage["held"],
            blocks_soon=each * usage["held"] * soon // max(1, counted.begun),
            blocks_total=each * usage["total"],
            work_s=self._costs.queued_s(counted.queued, counted.left, self._clock()),
            prefill_a0=a0,
            prefill_a1=a1,
            prefill_a2=a2,
            decode_step_s=self.step_s(running + 1),
            residual=self._costs.residual,
            flags=sum(ROLE_BITS[role] for role in self._config.roles if role in self.does or role not in BOTH)
            | CHANGING * (not self.does)
            | DRAINING * self.draining
            | STAGES * self.stages,
        )
        return self._complete(record)

    def waiting_by_class(self) -> dict[str, int]:
        """Number of requests per class that wait for blocks, a seat, their prefix, or KV from another node."""
        return _by_class(self._count())

    def running_soon(self, horizon_s: float) -> int:
        """Number of requests that will decode here in `horizon_s` seconds."""
        return self._soon(self._count(), horizon_s)

    def _soon(self, counted: Counted, horizon_s: float) -> int:
        step_s = self.step_s(max(1, len(counted.made)))
        most = self._config.max_num_seqs
        return running_soon(counted.made, counted.arriving, self.lengths.mean, step_s, horizon_s, most)

    def step_s(self, batch: int) -> float:
        """Seconds per token of `batch` requests with the mean length of the running ones."""
        running = len(self._batcher.running)
        mean = self._count().running_tokens / running if running else 0.0
        return self._costs.token_s(batch, round(batch * mean))

    def _count(self) -> Counted:
        """The sums over all requests. They are kept until a request changes; new requests are added to them, because
        each prompt of a burst asks for the load."""
        counted, version = self._counted, self._batcher.version
        if version != self._version:
            counted = self._counted = Counted()
            self._version = version
        requests = self._batcher.requests
        for request in islice(requests.values(), counted.requests, None):
            self._add(counted, request)
        counted.requests = len(requests)
        return counted

    def _add(self, counted: Counted, request: Request) -> None:
        state = request.state
        if state is RequestState.RUNNING:
            counted.running_tokens += request.num_tokens if request.cold is None else 0  # not like the others' steps
            if not request.handover:
                counted.made.append(request.num_output_tokens)
        else:
            counted.waiting[request.service_class] += 1
            counted.arriving += not request.handover
        counted.begun += state is not RequestState.WAITING
        if state is RequestState.REMOTE or request.num_uncomputed <= 1:
            return
        known, depths = self._shared(counted, request)
        if depths:
            keys = request.block_keys(self._config.block_size)
            counted.prefixes.update(keys[depth - 1] for depth in depths)
        counted.queued += 1
        counted.queued_tokens += request.num_uncomputed
        chunks, tokens, pairs = self._costs.left_features(request, self._chunk_tokens, known)
        counted.left = counted.left[0] + chunks, counted.left[1] + tokens, counted.left[2] + pairs

    def prefill_s(self, request: Request) -> float:
        """Seconds of prefill that a prompt would add to the queue."""
        known, _ = self._shared(self._count(), request)
        held = len(self._batcher.blocks.match(request)) * self._config.block_size
        return self._costs.prefill_left(request, self._config.max_num_batched_tokens, max(known, held))

    def _shared(self, counted: Counted, request: Request) -> tuple[int, list[int]]:
        """(the number of leading tokens that queued requests compute for a request behind them (step_planner.py), the
        depths of its compared blocks). It compares a few blocks of each prompt, so the number is accurate to a
        sixth."""
        if counted.queued >= COMPARED_PROMPTS or not self._batcher.blocks.prefix_caching or request.apart:
            return 0, []
        size = self._config.block_size
        keys = request.block_keys(size)
        depths = claimed_depths(request.num_computed // size, (request.num_tokens - 1) // size)
        known = next((depth * size for depth in reversed(depths) if keys[depth - 1] in counted.prefixes), 0)
        return known, depths

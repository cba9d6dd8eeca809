"""The batcher under every policy and queue order, driven by hypothesis: arrivals of all classes, shared prefixes,
prefix loads, reservations for pushed KV, accepted drafts, aborts at any moment, few blocks.

The toy model's next token depends on the whole context, so a lost, doubled or misplaced token shows.
"""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.config.config import Config
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.core.engine_load import EngineLoad
from engine.sampling.params import SamplingParams
from engine.step.request import Request, RequestState
from engine.step.step import Step
from sched.batching import MIN_CHUNK_TOKENS, Tuning, batching_policies
from sched.classes import BATCH, CLASSES
from sched.queueing import queue_orders

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))
CHUNK, MAX_LEN = 8, 40
PREFIXES = [[token] * 12 for token in (3, 5, 7)]


class OneTokenIsOneMs:
    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        return decodes / 1000

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        return round(1000 * seconds) - decodes


def next_token(tokens: list[int]) -> int:
    return 1 + (sum(tokens) * 31 + len(tokens)) % 50


def continued(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


class BatcherMachine(RuleBasedStateMachine):
    policy = order = ""

    @initialize(size=st.sampled_from([2, 4]), spare=st.integers(0, 12), seats=st.integers(1, 5), drawn=st.data())
    def start(self, size, spare, seats, drawn):
        self.size, self.now = size, 0.0
        self.budget = drawn.draw(st.sampled_from([seats, 9, 24]).filter(lambda budget: budget >= seats))
        tuning = Tuning(CHUNK, 0.010, OneTokenIsOneMs())
        pool = BlockPool(MAX_LEN // size + spare)
        policy, order = batching_policies[self.policy](tuning), queue_orders[self.order]()
        caching = drawn.draw(st.booleans())
        self.batcher = Batcher(pool, size, seats, self.budget, MAX_LEN, {0}, BatchRules(caching, policy, order))
        self.config = Config(block_size=size, max_num_seqs=seats, max_num_batched_tokens=self.budget)
        self.load = EngineLoad(self.config, self.batcher, StepCosts())
        self.prompts: dict[str, list[int]] = {}
        self.all: list[Request] = []
        self.aborted: set[str] = set()
        self.loading: list[Request] = []
        self.remote: list[tuple[Request, list[int]]] = []
        self.step: Step | None = None

    # --- what happens to a node

    @rule(
        prefix=st.sampled_from(PREFIXES),
        kept=st.integers(1, 12),
        tail=st.lists(st.integers(1, 9), max_size=6),
        name=st.sampled_from(list(CLASSES)),
        limit=st.integers(1, 10),
        remote=st.booleans(),
        age=st.floats(0, 30),
    )
    def arrive(self, prefix, kept, tail, name, limit, remote, age):
        prompt = prefix[:kept] + tail
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        request = Request(str(len(self.all)), list(prompt), len(prompt), params, self.now - age, ROOT, name)
        try:
            if remote:
                self.batcher.reserve(self.now, request)
                self.batcher.pool.hold(request.block_ids)
                self.remote.append((request, list(request.block_ids)))
            else:
                self.batcher.add(self.now, request)
        except OutOfBlocks:
            return
        self.all.append(request)
        self.prompts[request.request_id] = prompt

    @precondition(lambda self: self.step is None)
    @rule(passed=st.floats(0.001, 20))
    def schedule(self, passed):
        self.now += passed
        streams = {r.request_id for r in self.batcher.running if r.num_uncomputed == 1}
        self.step = self.batcher.schedule(self.now)
        if self.step:
            self.check_step(self.step, streams)

    @precondition(lambda self: self.step is not None)
    @rule(accepted=st.integers(1, 3))
    def commit(self, accepted):
        sampled = [continued(r.request.token_ids, accepted)[-accepted:] if r.samples else None for r in self.step.rows]
        done = self.batcher.commit(self.now, self.step, sampled)
        for request, index, kept in done.emitted:
            assert list(request.output_ids)[-kept:] == sampled[index][:kept]
        self.step = None

    @precondition(lambda self: self.step is not None and self.step.gives_way)
    @rule()
    def give_way(self):
        assert self.batcher.lets_in_at() in (0.0, inf)
        self.batcher.gave_way(self.now, self.step)
        self.step = None

    @rule(limit=st.integers(1, 3))
    def start_loads(self, limit):
        self.loading += self.batcher.loads(self.now, limit)

    @precondition(lambda self: self.loading)
    @rule()
    def finish_load(self):
        request = self.loading.pop(0)
        if not request.finished:
            self.batcher.blocks.adopt_prefix(request)
        self.batcher.loaded(self.now, request)

    @precondition(lambda self: self.remote)
    @rule()
    def pushed(self):
        request, blocks = self.remote.pop(0)
        self.batcher.pool.unhold(blocks)
        if not request.finished:
            self.batcher.arrived(self.now, request, next_token(request.token_ids))

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 1000))
    def abort(self, which):
        request = self.all[which % len(self.all)]
        if self.batcher.abort(self.now, request.request_id):
            self.aborted.add(request.request_id)

    @precondition(lambda self: self.step is not None)
    @rule()
    def crash(self):
        self.aborted |= {request.request_id for request in self.batcher.fail(self.now, self.step)}
        self.step = None

    # --- what must always hold

    def check_step(self, step: Step, streams: set[str]) -> None:
        """`streams`: what decoded before this step was made."""
        decodes = [row for row in step.rows if row.request.request_id in streams]
        prefills = [row for row in step.rows if row.request.request_id not in streams]
        # one token of a stream that gave its seat up, or was handed over, and has a seat again is a decode
        chunks = [row.num_tokens for row in prefills if not (row.num_tokens == 1 and row.request.num_output_tokens)]
        assert 0 < step.num_tokens <= self.budget
        assert len({row.request.request_id for row in step.rows}) == len(step.rows)
        still = {r.request_id for r in self.batcher.running} & streams
        if self.policy == "prefill-first":
            assert not (decodes and any(row.num_tokens > 1 for row in prefills))
        else:  # no running stream is ever left out, but those of class batch for streams of higher classes
            assert all(r.service_class == BATCH.name for r in step.left_out)
            left_out = {r.request_id for r in step.left_out}
            assert still - left_out == {row.request.request_id for row in decodes}
            higher = [row for row in step.rows if row.decodes and row.request.service_class != BATCH.name]
            assert higher or not still & left_out
        if self.policy == "mixed":
            assert sum(chunks) <= CHUNK
        if self.policy == "dynamic" and decodes:
            assert sum(chunks) <= MIN_CHUNK_TOKENS
        unfinished = [row for row in step.rows if not row.samples]
        unaligned = [row for row in unfinished if (row.start + row.num_tokens) % self.size]
        assert len(unaligned) <= 1 and (not unaligned or len(unfinished) == 1)
        for row in step.rows:
            assert row.start == row.request.num_computed
            assert len(row.request.block_ids) * self.size >= row.start + row.num_tokens

    @invariant()
    def books_agree(self):
        b = self.batcher
        b.check_integrity()
        owners = {id(r): r for r in [*b.requests.values(), *(row.request for row in (self.step or Step([])).rows)]}
        b.pool.check_request_owners(b.held_blocks())
        assert b.pool.references()["request"] == sum(len(r.block_ids) for r in owners.values())
        assert b.pool.references()["transfer"] == sum(len(blocks) for _, blocks in self.remote)
        assert len(b.running) <= b.seats.max_num_seqs
        assert all(r.state is RequestState.RUNNING for r in b.running)
        assert {*b.waiting, *b.running} <= set(b.requests.values())
        for request in b.requests.values():
            assert request.num_computed <= min(len(request.block_ids) * self.size, request.num_tokens)
            assert request.token_ids == continued(self.prompts[request.request_id], request.num_output_tokens)

    @invariant()
    def the_load_is_that_of_the_requests(self):
        counted_now = EngineLoad(self.config, self.batcher, StepCosts())
        assert self.load.word() == counted_now.word()
        assert self.load.running_soon(0.01) == counted_now.running_soon(0.01)

    def teardown(self):
        """Nothing new comes: everybody gets through, every block is free again."""
        if self.step:
            self.commit(1)
        for _ in range(2000):
            while self.loading:
                self.finish_load()
            if self.remote:
                self.pushed()
            self.schedule(0.01)
            if self.step is None and not self.remote:
                break
            if self.step:
                self.commit(1)
            self.books_agree()
        assert not self.batcher.requests
        assert self.batcher.pool.usage()["held"] == 0
        for request in self.all:
            prompt = self.prompts[request.request_id]
            assert request.token_ids == continued(prompt, request.num_output_tokens)
            if request.request_id not in self.aborted:
                wanted = min(request.sampling.max_tokens, MAX_LEN - len(prompt))
                assert request.num_output_tokens == wanted, request.journal


@pytest.mark.parametrize("order", queue_orders)
@pytest.mark.parametrize("policy", batching_policies)
def test_every_policy_under_every_order(policy, order):
    machine = type("Machine", (BatcherMachine,), {"policy": policy, "order": order})
    phases = [phase for phase in Phase if phase is not Phase.explain]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None, phases=phases)
    )


def test_a_prompt_without_room_in_the_step_takes_no_blocks_of_its_rows():
    """A prompt of a higher class took the blocks of the step's only row, got no tokens of the rest of the budget, and
    did so again in every step: the node stood still."""
    machine = type("Machine", (BatcherMachine,), {"policy": "prefill-first", "order": "weighted-fair"})()
    threes, sevens = (next(p for p in PREFIXES if p[0] == first) for first in (3, 7))
    machine.start(size=2, spare=0, seats=5, drawn=Drawn([5, False]))
    machine.schedule(passed=1.001)
    machine.arrive(age=0.0, kept=1, limit=2, name="standard", prefix=threes, remote=False, tail=[1] * 6)
    machine.schedule(passed=0.001)
    machine.start_loads(limit=1)
    machine.arrive(age=0.0, kept=3, limit=2, name="batch", prefix=threes, remote=True, tail=[])
    machine.arrive(age=7.96, kept=2, limit=10, name="batch", prefix=sevens, remote=False, tail=[])
    for _ in range(9):
        machine.start_loads(limit=1)
    machine.arrive(age=0.0, kept=1, limit=3, name="interactive", prefix=threes, remote=False, tail=[1])
    machine.arrive(age=0.0, kept=12, limit=1, name="standard", prefix=threes, remote=False, tail=[1] * 5)
    machine.arrive(age=0.0, kept=8, limit=4, name="interactive", prefix=threes, remote=False, tail=[1] * 5)
    machine.arrive(age=0.0, kept=1, limit=2, name="interactive", prefix=threes, remote=False, tail=[])
    machine.teardown()


class Drawn:
    """Values for `start`, in place of those that hypothesis draws."""

    def __init__(self, values: list[object]) -> None:
        self._values = values

    def draw(self, strategy: object) -> object:
        return self._values.pop(0)

"""The batcher with layers that keep a state: whatever is reused, preempted and given back, every row starts from the
state after the tokens before it, and reads the KV of all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.layer_groups import GONE, layer_groups
from cache.pool.block_pool import BlockPool, IntegrityError
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.core.kv_ready import OVERLAPS, KvReady, KvTarget
from engine.speculation.speculative import CALIBRATE_EVERY, CALIBRATE_STEPS, Speculator, VerifyCost, accepted
from engine.step.inputs import InputBuilder
from engine.step.rows import row_of
from engine.step.step import ScheduledRow, Step
from tests.engine.core.test_kv_ready import GEOMETRY as UNIFORM
from tests.engine.toy_model import EOS, alone, next_token, request, run_dry, run_step

SIZE, BUDGET = 4, 16
STATE_BYTES = 3 * UNIFORM.layer_bytes
GROUPS = layer_groups((), [True, True, False, True, False], STATE_BYTES, UNIFORM.layer_bytes)
assert GROUPS is not None and GROUPS.num_states == 5  # 9 layers' bytes in blocks of 2
GEOMETRY = replace(UNIFORM, num_layers=GROUPS.layers, groups=GROUPS)
BUILDER = InputBuilder(SIZE, torch.device("cpu"), groups=GROUPS)


def with_states(blocks: int, interval: int = 2, seqs: int = 4, caching: bool = True) -> Batcher:
    rules = BatchRules(caching, groups=GROUPS, state_interval=interval)
    return Batcher(BlockPool(blocks), SIZE, seqs, BUDGET, 1000, {EOS}, rules)


class Memory:
    """What the model writes: of every slot the tokens up to its own, of every block with a part of a state the part and
    the tokens before it."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, tuple[int, ...]]] = {}

    def compute(self, step: Step) -> None:
        inputs = BUILDER.build([row_of(row, ()) for row in step.rows])
        states = inputs.states
        assert states is not None
        for s, at in enumerate(inputs.order):
            row, tokens = step.rows[at], text_of(step.rows[at])
            assert bool(states.fresh[s]) == (row.start == 0)
            if row.start:
                for part, block in enumerate(states.read[s].tolist()):
                    assert self.states[block] == (part, tuple(tokens[: row.start]))
            for at in range(row.start, row.start + row.num_tokens):
                self.slots[row.request.block_ids[at // SIZE], at % SIZE] = tuple(tokens[: at + 1])
            for at in range(row.start + row.num_tokens):
                assert self.slots[row.request.block_ids[at // SIZE], at % SIZE] == tuple(tokens[: at + 1])
        for s, at in enumerate(inputs.order):
            row = step.rows[at]
            decodes = len(states.decodes)
            ends = [(1, states.decodes[s])] if s < decodes else states.chunks[s - decodes]
            assert ends[-1][0] == row.num_tokens - row.num_drafts
            for end, blocks in ends:
                for part, block in enumerate(blocks.tolist()):
                    self.states[block] = part, tuple(row.request.token_ids[: row.start + end])


def text_of(row: ScheduledRow) -> list[int]:
    """The known tokens up to the end of the row, and its draft."""
    return [*row.request.token_ids[: row.start + row.num_tokens - row.num_drafts], *row.draft]


class Guesses:
    """Drafts that are right up to a random place."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def of(self, root: bytes) -> Guesses:
        return self

    def extend(self, tokens: list[int], limit: int) -> int:
        return 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        right = alone(list(tokens), count)
        wrong = self.rng.randrange(2 * count)
        return [token + (place >= wrong) for place, token in enumerate(right)]

    def ended(self, root: bytes, output: list[int]) -> None: ...

    def catch_up(self, limit: int) -> int:
        return 0


class Right(Guesses):
    """Drafts that are all right."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return alone(list(tokens), count)


def verified(row: ScheduledRow) -> list[int] | None:
    """What the sampler chooses, up to the first wrong draft."""
    if not row.samples:
        return None
    known = row.request.token_ids
    chosen = [next_token([*known, *row.draft[:place]]) for place in range(row.num_drafts + 1)]
    return chosen[: accepted(row.draft, chosen) + 1]


PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=6)


def played(b, memory, prompts):
    """Each computed step until the prompts have ended, for the caller to commit: (now, step). (length, which of three
    texts, tokens to make) of each prompt; texts share their beginnings. Then all tokens are those of a prompt alone."""
    wanted = {}
    for number, (length, text, count) in enumerate(prompts):
        prompt = [1 + i % 7 for i in range(min(20, length))] + [text + 10 + i % 5 for i in range(max(0, length - 20))]
        wanted[f"r{number}"] = alone(prompt, count)
        b.add(number, request(f"r{number}", prompt, number, max_tokens=count))
    found = dict(b.requests)
    for now in range(2000):
        for one in b.loads(now, 4):
            b.blocks.adopt_prefix(one)
            b.loaded(now, one)
        step = b.schedule(now)
        if step is None:
            break
        memory.compute(step)
        b.check_integrity()
        b.pool.check_request_owners(b.held_blocks())
        yield now, step
    assert {name: list(one.output_ids) for name, one in found.items()} == wanted
    assert b.pool.usage()["held"] == 0


@settings(max_examples=120, deadline=None)
@given(PROMPTS, st.integers(70, 120), st.integers(0, 3), st.booleans())
def test_every_row_starts_from_its_state(prompts, blocks, interval, caching):
    b, memory = with_states(blocks, interval, caching=caching), Memory()
    for now, step in played(b, memory, prompts):
        for row in step.rows:
            tables = row.request.others
            assert len({tuple(block == GONE for block in table) for table in tables}) == 1
        run_step(b, now, step)


@settings(max_examples=120, deadline=None)
@given(PROMPTS, st.integers(70, 120), st.integers(0, 3), st.integers(1, 9), st.integers(0, 999))
def test_drafts_change_no_token_and_no_state(prompts, blocks, interval, most, seed):
    """Of models with states: accepted drafts are computed again, rejected ones leave nothing; also after preemptions,
    and where a draft crosses a border at which a state is saved."""
    speculator = Speculator("ngram", most, Guesses(random.Random(seed)), "fixed", 1000, lambda rows, context: None)
    rules = BatchRules(True, groups=GROUPS, state_interval=interval, speculator=speculator)
    b, memory = Batcher(BlockPool(blocks), SIZE, 4, BUDGET, 1000, {EOS}, rules), Memory()
    for now, step in played(b, memory, prompts):
        for row in step.rows:
            if row.draft:
                speculator.verified(row.request, row.num_drafts, len(verified(row)) - 1)
        b.commit(now, step, [verified(row) for row in step.rows])
        b.check_integrity()


def drafting(groups, length, token_s, tokens=20):
    """The rows of one request whose drafts are all right; a step without them takes a second, a draft `token_s`."""
    cost = VerifyCost(1.0, 0.0, 0.0, token_s)
    speculator = Speculator("ngram", 3, Right(random.Random(0)), length, 1000, lambda rows, context: cost)
    b = Batcher(BlockPool(300), SIZE, 4, BUDGET, 1000, {EOS}, BatchRules(True, groups=groups, speculator=speculator))
    one = request("a", list(range(1, 10)), max_tokens=tokens)
    b.add(0, one)
    for r in b.loads(0, 4):
        b.loaded(0, r)
    rows = []
    while (step := b.schedule(0)) is not None:
        (row,) = step.rows
        rows.append(row)
        chosen = verified(row)
        if row.draft:
            speculator.verified(row.request, row.num_drafts, len(chosen) - 1)
        b.commit(0, step, [chosen])
    assert list(one.output_ids) == alone(list(range(1, 10)), tokens)
    return rows


def test_accepted_drafts_are_computed_again_by_the_next_step():
    rows = [(row.start, row.num_tokens, row.num_drafts, row.again, row.decodes) for row in drafting(GROUPS, "fixed", 0)]
    assert rows[:4] == [(0, 9, 0, 0, False), (9, 4, 3, 0, True), (10, 7, 3, 3, True), (14, 7, 3, 3, True)]


@pytest.mark.parametrize(("token_s", "plain", "states"), [(0.55, True, False), (0.1, True, True), (2.0, False, False)])
def test_with_states_drafts_must_pay_for_being_computed_again(token_s, plain, states):
    """Which models get drafts: at a cost of 0.55, only one that computes accepted drafts once."""
    assert any(row.num_drafts for row in drafting(None, "auto", token_s)) == plain
    assert any(row.num_drafts for row in drafting(GROUPS, "auto", token_s)) == states


def test_steps_for_comparison_are_plain():
    """They neither have drafts nor compute any again, so what a step without drafts takes is learnt from them."""
    costs, learnt = StepCosts(), []
    rows = [row for row in drafting(GROUPS, "auto", 0.01, tokens=400) if row.decodes]
    for at, row in enumerate(rows, 1):
        before = costs.decode.regression.coefficients
        costs.observe(Step([row]), 0.02)
        if costs.decode.regression.coefficients != before:
            learnt.append(at)
    assert len(rows) > CALIBRATE_EVERY and max(row.again for row in rows) == 3
    assert learnt == [*range(1, CALIBRATE_STEPS + 1), CALIBRATE_EVERY]


@pytest.mark.parametrize(
    ("prompt", "interval", "cached"),
    [
        (list(range(1, 50)), 0, 48),  # the same prompt: its last border
        ([*range(1, 40), 99, 98], 2, 32),  # a common beginning of 39 tokens, a state after every 8
        ([*range(1, 40), 99, 98], 0, 0),  # none at any of its borders
        ([*range(1, 50), *alone(list(range(1, 50)), 10), 7, 8, 9], 0, 56),  # the next turn: the last border of 58
    ],
)
def test_a_prefix_is_found_up_to_a_state(prompt, interval, cached):
    b = with_states(120, interval)
    b.add(0, request("a", list(range(1, 50)), max_tokens=10))
    run_dry(b)
    one = request("b", prompt, max_tokens=3)
    b.add(0, one)
    for r in b.loads(0, 4):
        b.loaded(0, r)
    run_dry(b)
    assert one.num_cached == cached


def test_a_shared_prompt_is_computed_once():
    """The second request waits for the state that the first one saves at its end, in steps of four blocks."""
    b = with_states(150, 0)
    prompt = [1 + i % 9 for i in range(62)]
    for number in range(2):
        b.add(number, request(f"r{number}", prompt, number, max_tokens=2))
    for now in range(100):
        for one in b.loads(now, 4):
            b.loaded(now, one)
        step = b.schedule(now)
        if step is None:
            break
        assert len([row for row in step.rows if row.num_tokens > 2]) <= 1
        run_step(b, now, step)
    assert b.num_preemptions == 0


def test_a_request_that_loses_its_blocks_goes_on_at_its_last_border():
    b = with_states(120, 0)
    one = request("a", list(range(1, 30)), max_tokens=30)
    b.add(0, one)
    for now in range(12):
        run_step(b, now, b.schedule(now))
    computed = one.num_computed
    b.seats.lose(20, one)
    assert b.blocks.adopt_prefix(one) == computed // SIZE and computed // SIZE * SIZE < computed
    run_dry(b)
    assert list(one.output_ids) == alone(list(range(1, 30)), 30)


def test_what_ends_is_told_once_with_its_state():
    """(key, block) of all parts, for the pool of the cluster: at the prompt's last border, and at the answer's."""
    b, told = with_states(120, 0), []
    b.add(0, request("a", list(range(1, 31)), max_tokens=8))
    for now in range(100):
        step = b.schedule(now)
        if step is None:
            break
        told += run_step(b, now, step).named
    keys = [key for key, *_ in told]
    assert len(set(keys)) == len(keys) == 37 // SIZE + 2 * GROUPS.num_states


def test_a_long_prompt_needs_few_states():
    """40 blocks of tokens in an arena that could not hold a state at each."""
    b = with_states(90, 4)
    one = request("a", [1 + i % 9 for i in range(160)], max_tokens=20)
    b.add(0, one)
    run_dry(b)
    assert one.finish_reason == "length"


def test_a_table_without_the_state_is_found():
    b = with_states(60)
    one = request("a", list(range(1, 12)), max_tokens=9)
    b.add(0, one)
    run_step(b, 0, b.schedule(0))
    b.check_integrity()
    one.others[2][(one.num_computed - 1) // SIZE] = GONE
    with pytest.raises(IntegrityError, match="lacks blocks of group 3"):
        b.check_integrity()


@given(st.integers(1, 60), st.integers(0, 3), st.sets(st.integers(1, 60)), st.sampled_from(OVERLAPS))
def test_only_the_last_state_leaves(tokens, cached, cuts, overlap):
    """All KV of tokens that the decode node lacks, and one state, the last bytes of which are those of the end."""
    receiver, sender = with_states(200), with_states(200)
    there, here = request("r", [1] * tokens), request("r", [1] * tokens)
    receiver.blocks.take_all(there)
    target = KvTarget("d", "kv", there.block_ids, 0, "", there.others)
    ready = KvReady(GEOMETRY, target, tokens, overlap)
    landed: dict[tuple[int, int], int] = {}  # (block there, part of 4 bytes) -> tokens when it left
    start = min(cached * SIZE, (tokens - 1) // SIZE * SIZE)
    if start:
        sender.blocks.extend(here, start)
        here.num_computed = start
    for end in sorted({cut for cut in cuts if start < cut < tokens} | {tokens}):
        sender.blocks.extend(here, end - start)
        for layer in range(GEOMETRY.model_layers):
            tables = [list(table) for table in here.others]
            for piece in ready.layer_done(list(here.block_ids), layer, start, end, tables):
                assert piece.block_id != GONE and piece.remote >= 0
                block, offset = divmod(piece.remote, GEOMETRY.block_bytes)
                assert piece.local % GEOMETRY.block_bytes == offset
                landed |= {(block, at): end for at in range(offset, offset + piece.nbytes, 4)}
        here.num_computed = start = end
    of_states = {block for table in there.others for block in table if block != GONE}
    assert len(of_states) == GROUPS.num_states
    assert {block for block, _ in landed} == of_states | set(there.block_ids)
    used = 3 * STATE_BYTES
    assert sum(block in of_states for block, _ in landed) * 4 >= used
    assert all(end == tokens for (block, _), end in landed.items() if block in of_states)

"""How many drafts a row gets, and what is remembered of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.sampling.params import SamplingParams
from engine.speculation.ngram import NgramLookups
from engine.speculation.speculative import Acceptance, Speculator, VerifyCost, accepted, goodput_lengths
from engine.step.request import Request
from engine.step.step import ScheduledRow, Step

COST = VerifyCost(0.01, 0.0, 0.0, 0.001)
ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))


def speculator(method="ngram", num_tokens=4, length="fixed", max_len=1000) -> Speculator:
    lookups = NgramLookups(1, 3) if method == "ngram" else None
    return Speculator(method, num_tokens, lookups, length, max_len, lambda rows, context: COST)


def batcher(own: Speculator, blocks=16, budget=16, seqs=4) -> Batcher:
    return Batcher(BlockPool(blocks), 4, seqs, budget, 1000, {0}, BatchRules(speculator=own))


def start(b: Batcher, name: str, prompt: list[int], token: int, **sampling) -> Request:
    """A request whose prompt is computed: `token` is its first output."""
    r = Request(name, prompt, len(prompt), SamplingParams(**({"max_tokens": 50} | sampling)), 0.0, ROOT)
    b.add(0, r)
    step = b.schedule(0)
    b.commit(0, step, [(token,) if row.request is r else (9,) for row in step.rows])
    return r


@given(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 2**32))
def test_accepted_is_the_common_prefix(draft, salt):
    chosen = [(salt >> i) % 3 for i in range(len(draft) + 1)]
    count = accepted(draft, chosen)
    assert draft[:count] == chosen[:count]
    assert count == len(draft) or draft[count] != chosen[count]


def test_drafts_take_what_is_left_and_roll_back():
    own = speculator()
    b = batcher(own)
    r = start(b, "a", [1, 2, 3, 1, 2, 3], 1)
    step = b.schedule(1)
    (row,) = step.rows
    assert (row.start, row.num_tokens, row.num_drafts, row.draft) == (6, 5, 4, [2, 3, 1, 2])
    assert len(r.block_ids) == 3
    done = b.commit(1, step, [(2, 3, 8)])  # two were right
    own.verified(r, 4, 2)
    assert done.emitted == [(r, 0, 3)]
    assert (r.num_tokens, r.num_computed, r.num_named) == (10, 9, 2)
    assert own.totals.per_position == [1, 1, 0, 0]
    b.abort(2, "a")
    assert b.pool.usage()["held"] == 0
    assert own.state()["requests"] == 0
    b.check_integrity()


def test_a_block_with_rejected_drafts_is_not_named():
    own = speculator(num_tokens=8)
    b = batcher(own)
    r = start(b, "a", [1, 2, 3, 1, 2, 3], 1)
    step = b.schedule(1)
    assert step.rows[0].num_tokens == 9  # positions 6..14: blocks 1, 2 and a part of 3
    b.commit(1, step, [(7,)])
    assert (r.num_computed, r.num_named) == (7, 1)
    assert b.pool.usage()["named"] == 1


@pytest.mark.parametrize(
    ("sampling", "max_len", "drafts"),
    [
        ({"max_tokens": 3}, 1000, 1),  # one is out, so a draft and the token behind it are the end
        ({"max_tokens": 2}, 1000, 0),
        ({}, 9, 1),
        ({}, 8, 0),
        ({}, 1000, 4),
    ],
)
def test_never_past_the_end(sampling, max_len, drafts):
    own = speculator(max_len=max_len)
    b = batcher(own)
    start(b, "a", [1, 2, 3, 1, 2, 3], 1, **sampling)
    assert b.schedule(1).rows[0].num_drafts == drafts


def test_budget_and_blocks_go_to_the_others_first():
    own = speculator()
    b = batcher(own, budget=10)
    start(b, "a", [1, 2, 3, 1, 2, 3], 1)
    b.add(1, Request("long", [5] * 9, 9, SamplingParams(), 1.0, ROOT))
    step = b.schedule(1)
    assert [(row.request.request_id, row.num_drafts) for row in step.rows] == [("a", 0), ("long", 0)]

    own = speculator()
    b = batcher(own, blocks=2)
    start(b, "a", [1, 2, 3, 1, 2, 3], 1)  # its 2 blocks hold one token more
    assert b.schedule(1).rows[0].num_drafts == 1
    assert b.num_preemptions == 0


def test_no_drafts_for_a_request_that_is_handed_over_or_still_a_prompt():
    own = speculator("draft")
    b = batcher(own, budget=4)
    r = Request("a", [1] * 9, 9, SamplingParams(max_tokens=50), 0.0, ROOT)
    b.add(0, r)
    assert [row.num_drafts for row in b.schedule(0).rows] == [0]
    r.handover = True
    b.commit(0, b.schedule(0), [None])
    own.plan(b.schedule(0).rows, 10, b.blocks)
    assert len(r.block_ids) == 2


def test_a_draft_model_reserves_room_and_may_fall_short():
    b = batcher(speculator("draft"))
    start(b, "a", [1, 2, 3], 4)
    (row,) = b.schedule(1).rows
    assert (row.num_drafts, row.num_tokens, row.draft) == (4, 5, [])
    row.set_draft([6])
    assert (row.num_drafts, row.num_tokens) == (1, 2)


# --- how many pay


def test_free_tokens_are_all_taken_and_dear_ones_not():
    free, dear = VerifyCost(1.0, 0, 0, 0), VerifyCost(1.0, 0, 0, 1.0)
    assert goodput_lengths([4, 2], [0.5, 0.5], free) == [4, 2]
    assert goodput_lengths([4, 4], [0.9, 0.9], dear) == [0, 0]
    assert goodput_lengths([4], [1.0], free, 0.5) == [4]
    assert goodput_lengths([4], [1.0], free, 1.5) == [0]
    assert goodput_lengths([], [], free) == []
    assert goodput_lengths([1], [0.9], VerifyCost(1.0, 1.0, 0, 0)) == [0]
    assert goodput_lengths([4], [0.9], VerifyCost(1.0, 1.0, 0, 0)) == [4], "several drafts pay what one does not"


def test_large_batches_and_bad_records_speculate_less():
    def longest(rows: int, rate: float) -> int:
        cost = VerifyCost(0.010 + 0.001 * rows, 0, 0, 0.001)
        return max(goodput_lengths([8] * rows, [rate] * rows, cost))

    assert [longest(n, 0.6) for n in (1, 4, 16, 64)] == sorted((longest(n, 0.6) for n in (1, 4, 16, 64)), reverse=True)
    assert longest(1, 0.6) > longest(64, 0.6)
    assert longest(4, 0.9) > longest(4, 0.5) > longest(4, 0.02) == 0
    assert goodput_lengths([8, 8], [0.9, 0.02], VerifyCost(0.01, 0, 0, 0.001))[1] == 0


@pytest.mark.parametrize(("rows", "rate", "token_s"), [(1, 0.80, 0.60), (32, 0.95, 0.027)])
def test_an_accepted_draft_that_is_computed_again_costs_two_tokens(rows, rate, token_s):
    """Of a step of one second. Drafts that pay where they are computed once would make decoding slower."""
    cost = VerifyCost(1.0, 0, 0, token_s)
    once = goodput_lengths([8] * rows, [rate] * rows, cost)
    assert min(once) > 0
    right = sum(rate**j for j in range(1, once[0] + 1))
    assert 1 + right < 1 + rows * token_s * (once[0] + right), "with the second time"
    assert goodput_lengths([8] * rows, [rate] * rows, cost, again=True) == [0] * rows


def test_drafts_that_are_computed_again_may_pay():
    def speed(count: int) -> float:
        right = sum(0.9**j for j in range(1, count + 1))
        return (1 + right) / (1 + 0.2 * (count + right))

    (found,) = goodput_lengths([8], [0.9], VerifyCost(1.0, 0, 0, 0.2), again=True)
    assert found == max(range(9), key=speed) and speed(found) > 1.7


seconds = st.floats(0, 0.01)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    st.builds(VerifyCost, st.floats(1e-3, 0.1), seconds, seconds, seconds),
    seconds,
    st.booleans(),
)
def test_the_lengths_promise_at_least_what_no_drafts_and_full_ones_of_all_worthy_rows_do(
    rows, cost, draft_seconds, again
):
    most, rates = [m for m, _ in rows], [r for _, r in rows]

    def speed(counts: list[int]) -> float:
        expected = sum(sum(rate**j for j in range(n + 1)) for n, rate in zip(counts, rates, strict=True))
        tokens = sum(counts) + again * (expected - len(counts))
        extra = cost.row * sum(map(bool, counts)) + cost.token * tokens + draft_seconds * max(counts)
        return expected / (cost.plain + extra + (cost.step if any(counts) else 0))

    counts = goodput_lengths(most, rates, cost, draft_seconds, again)
    assert all(0 <= n <= m for n, m in zip(counts, most, strict=True))
    assert speed(counts) >= speed([0] * len(most)) * (1 - 1e-9)
    if any(counts):
        assert speed(counts) >= speed([min(n, max(counts) - 1) for n in counts]) * (1 - 1e-9)


def test_what_drafts_cost_is_learnt_beside_plain_steps():
    """Plain steps 10 ms + 1 ms per row; drafts 3 ms more, 1 ms per row with some, 0.2 ms per token."""
    costs = StepCosts()
    for i in range(120):
        own = 1 + i % 4
        requests = [Request(f"r{n}", [1] * 60, 50, SamplingParams(), 0.0, ROOT) for n in range(own)]
        drafts = [(i + n) % 5 if i % 3 else 0 for n in range(own)]
        rows = [ScheduledRow(r, 59, 1 + d, True, d, [1] * d) for r, d in zip(requests, drafts, strict=True)]
        took = 0.010 + 0.001 * own + (0.003 if any(drafts) else 0) + 0.001 * sum(map(bool, drafts)) + 2e-4 * sum(drafts)
        costs.observe(Step(rows), took)
    cost = costs.verify_cost(2, 120)
    assert cost.plain == pytest.approx(0.012, rel=0.05)
    assert cost.step + 2 * cost.row + 6 * cost.token == pytest.approx(0.003 + 0.002 + 0.0012, rel=0.15)


def test_automatic_lengths_begin_with_plain_steps():
    own = speculator(length="auto")
    b = batcher(own)
    start(b, "a", [1, 2] * 3, 1)
    seen = []
    for now in range(1, 12):
        step = b.schedule(now)
        seen.append(step.rows[0].num_drafts)
        draft = step.rows[0].draft
        b.commit(now, step, [(*draft, 1 + now % 2)] if not draft else [(*draft, draft[-2])])
    assert seen[:6] == [0] * 6 and max(seen) > 0


def test_a_new_request_starts_from_what_others_achieved():
    own = speculator(length="auto")
    b = batcher(own, blocks=64, seqs=8)
    old = start(b, "old", [5, 6, 7, 8], 9)
    for _ in range(100):
        own.verified(old, 4, 0)
    start(b, "new", [1, 2] * 3, 1)
    for now in range(1, 10):
        step = b.schedule(now)
        assert [row.num_drafts for row in step.rows] == [0] * len(step.rows)
        b.commit(now, step, [(1 + now % 2,)] * len(step.rows))


def test_acceptance_is_learnt_and_forgotten():
    a = Acceptance()
    prior = a.rate()
    for _ in range(20):
        a.observe(4, 0)
    assert a.rate() < 0.2
    for _ in range(300):
        a.idle()
    assert a.rate() == pytest.approx(prior, abs=0.05)
    for _ in range(40):
        a.observe(4, 4)
    assert a.rate() > 0.95

"""How many drafts a row gets, and what is remembered of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import BlockGeometry, root_key
from cache.pool import BlockPool
from engine.batcher import Batcher
from engine.request import Request, SamplingParams
from engine.speculative import Acceptance, Speculator, accepted, goodput_lengths

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))


def speculator(method="ngram", num_tokens=4, length="fixed", max_len=1000) -> Speculator:
    return Speculator(method, num_tokens, (1, 3), length, max_len, lambda tokens, context: 0.01 + 0.001 * tokens)


def batcher(own: Speculator, blocks=16, budget=16, seqs=4) -> Batcher:
    return Batcher(BlockPool(blocks), 4, seqs, budget, 1000, {0}, speculator=own)


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
    assert goodput_lengths([4, 2], [0.5, 0.5], lambda n: 1.0, 0.0) == [4, 2]
    assert goodput_lengths([4, 4], [0.5, 0.5], lambda n: 1.0 * n, 0.0) == [0, 0]
    assert goodput_lengths([4], [1.0], lambda n: 1.0 + 0.1 * n, 0.5) == [4]
    assert goodput_lengths([4], [1.0], lambda n: 1.0 + 0.1 * n, 1.5) == [0]
    assert goodput_lengths([], [], lambda n: 1.0, 0.0) == []


def test_large_batches_and_bad_records_speculate_less():
    def seconds(n: int) -> float:
        return 0.010 + 0.001 * n

    def total(rows: int, rate: float) -> int:
        return max(goodput_lengths([8] * rows, [rate] * rows, seconds, 0.0))

    assert [total(n, 0.6) for n in (1, 4, 16, 64)] == sorted((total(n, 0.6) for n in (1, 4, 16, 64)), reverse=True)
    assert total(1, 0.6) > total(64, 0.6)
    assert total(4, 0.9) > total(4, 0.5) > total(4, 0.02) == 0
    assert goodput_lengths([8, 8], [0.9, 0.02], seconds, 0.0)[1] == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.01, 1.0)), min_size=1, max_size=5), st.floats(0, 0.01))
def test_every_round_of_drafts_raises_tokens_per_second(rows, draft_seconds):
    most, rates = [m for m, _ in rows], [r for _, r in rows]

    def speed(counts: list[int]) -> float:
        expected = sum(sum(rate**j for j in range(n + 1)) for n, rate in zip(counts, rates, strict=True))
        return expected / (0.01 + 0.002 * (len(rows) + sum(counts)) + draft_seconds * max(counts))

    counts = goodput_lengths(most, rates, lambda n: 0.01 + 0.002 * n, draft_seconds)
    assert all(0 <= n <= m for n, m in zip(counts, most, strict=True))
    if max(counts):
        fewer = [min(n, max(counts) - 1) for n in counts]
        assert speed(counts) >= speed(fewer) * (1 - 1e-9)


def test_acceptance_is_learnt_and_forgotten():
    a = Acceptance()
    prior = a.rate
    for _ in range(20):
        a.observe(4, 0)
    assert a.rate < 0.2
    for _ in range(300):
        a.idle()
    assert a.rate == pytest.approx(prior, abs=0.05)
    for _ in range(40):
        a.observe(4, 4)
    assert a.rate > 0.95

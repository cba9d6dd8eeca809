"""The budget of a link: no window of time sees more bytes than the rate and one bucket allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sites.budget import BURST_S, LinkBudget

BLOCK = 100

steps = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 600), st.sampled_from(["take", "divide"])), min_size=1, max_size=60
)


@given(rate=st.floats(1.0, 5000.0), steps=steps)
def test_no_window_exceeds_the_rate_and_one_bucket(rate, steps):
    budget, now, taken = LinkBudget(rate, BLOCK), 0.0, []
    burst = budget.burst_bytes
    for pause, nbytes, what in steps:
        now += pause
        if what == "divide":
            budget.divided(now, nbytes % 4)
        elif nbytes <= budget.burst_bytes and budget.take(now, nbytes):
            taken.append((now, nbytes))
    for i, (begin, _) in enumerate(taken):
        crossed = 0
        for at, nbytes in taken[i:]:
            crossed += nbytes
            assert crossed <= burst + rate * (at - begin) + 1e-3


@given(rate=st.floats(1.0, 5000.0), nodes=st.integers(1, 5), rounds=st.integers(1, 20))
def test_the_parts_of_all_nodes_together_are_the_budget(rate, nodes, rounds):
    parts = [LinkBudget(rate, BLOCK) for _ in range(nodes)]
    for part in parts:
        part.divided(0.0, nodes)
    crossed = 0
    for turn in range(rounds):
        for part in parts:
            while part.take(float(turn), BLOCK):
                crossed += BLOCK
    assert crossed <= sum(part.burst_bytes for part in parts) + rate * (rounds - 1) + 1e-3


@given(rate=st.floats(1.0, 5000.0), booked=st.floats(0.0, 5000.0), nbytes=st.integers(1, 500))
def test_after_the_wait_the_bytes_may_cross_and_not_before(rate, booked, nbytes):
    budget = LinkBudget(rate, BLOCK)
    while budget.take(0.0, int(min(budget.burst_bytes, BLOCK))):
        pass
    if nbytes > budget.burst_bytes:
        with pytest.raises(ValueError, match="in parts"):
            budget.take(0.0, nbytes)
        return
    wait_s = budget.wait_s(0.0, nbytes)
    budget.book(booked)
    behind_s = budget.wait_s(0.0, nbytes)
    assert behind_s == pytest.approx(wait_s + booked / rate) if wait_s else behind_s <= booked / rate
    budget.unbook(booked)
    if wait_s > 1e-3:
        assert not budget.take(0.9 * wait_s, nbytes)
    assert budget.take(wait_s, nbytes)


def test_an_idle_link_gathers_one_bucket_at_most():
    budget = LinkBudget(1000.0, BLOCK)
    assert budget.burst_bytes == BURST_S * 1000.0
    assert budget.take(0.0, 500) and not budget.take(0.0, 1)
    assert budget.take(100.0, 500) and not budget.take(100.0, 1)


def test_a_bucket_holds_one_block_however_slow_the_link_is():
    budget = LinkBudget(1.0, BLOCK)
    assert budget.take(0.0, BLOCK) and not budget.take(99.0, BLOCK) and budget.take(100.0, BLOCK)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_needs_a_rate(rate):
    with pytest.raises(ValueError, match="moves nothing"):
        LinkBudget(rate, BLOCK)


@given(rate=st.floats(1.0, 5000.0), blocks=st.integers(1, 100), parts=st.integers(1, 5))
def test_a_part_of_a_transfer_is_one_that_the_bucket_can_give(rate, blocks, parts):
    budget = LinkBudget(rate, BLOCK)
    budget.divided(0.0, parts)
    count = budget.at_once(blocks)
    assert 1 <= count <= blocks
    assert budget.take(1e6, count * BLOCK)
    now = 1e6
    while not budget.take(now, count * BLOCK):
        pause_s = budget.pause_s(count * BLOCK)
        assert pause_s > 0
        now += pause_s
    assert now - 1e6 <= count * BLOCK / budget.bytes_per_s + budget.pause_s(count * BLOCK) + 1e-3

"""A long prompt next to short ones on one node: who waits how long, and what the long one loses."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.part_turns import GIVES_WAY_S, LOST_SHARE, MOST_LOST_S, MOST_OWED_S, RECENT_S, SLICE_S, PartTurns

CHUNK_S, LAYER_S, FIXED_S = 0.36, 0.02, 0.004


def computed(part_s: float, shorts: Sequence[tuple[float, float]]) -> tuple[list[float], float, int]:
    """Run a part of `part_s` seconds of work and short prompts (arrival, seconds), one per step; every step takes
    FIXED_S in addition. Returns (the wait of each short prompt, the end of the part, its steps)."""
    turns, now, left, waits, steps = PartTurns(), 0.0, part_s, list[float](), 0
    coming, end, chunk_left = sorted(shorts), inf, 0.0
    while left > 1e-9 or coming:
        here = bool(coming) and coming[0][0] <= now
        part = left > 1e-9 and not (here and not turns.part_first)
        if not part and not here:
            now = coming[0][0]
            continue
        turns.begin(now, part, left > 1e-9 and not part)
        if part:
            took = 0.0
            chunk_left = chunk_left if chunk_left > 1e-9 else min(CHUNK_S, left)
            while chunk_left - took > 1e-9:
                took += min(LAYER_S, chunk_left - took)
                came = bool(coming) and coming[0][0] <= now + took
                if came and now + took >= turns.lets_in_at(higher=False, was_here=here):
                    break
            left, chunk_left, steps = left - took, chunk_left - took, steps + 1
        else:
            arrival, took = coming.pop(0)
            waits.append(now - arrival)
        now += took + FIXED_S
        turns.end(now)
        if part and left <= 1e-9:
            end = now
    return waits, end, steps


def test_without_other_prompts_chunks_stay_whole():
    _, end, steps = computed(7.2, [])
    assert steps == 20 and end == pytest.approx(7.2 + 20 * FIXED_S)


def test_who_comes_now_and_then_waits_for_a_layer():
    """And the part loses their time and one more step for each of them."""
    shorts = [(0.3 + 0.47 * i, 0.05) for i in range(20)]
    waits, end, steps = computed(7.2, shorts)
    assert max(waits) <= LAYER_S + FIXED_S + 1e-9
    assert steps <= 20 + len(shorts)
    assert end <= 7.2 + len(shorts) * (0.05 + FIXED_S) + steps * FIXED_S + 1e-9


def test_a_queue_of_them_leaves_the_part_half_of_the_time():
    waits, end, _ = computed(5.0, [(0.0, 0.2)] * 100)
    assert end == pytest.approx(10.0, rel=0.15)
    assert len(waits) == 100


def test_after_a_long_queue_nobody_waits_for_all_that_is_owed():
    """One step took long; then a short prompt comes."""
    waits, _, _ = computed(60.0, [(0.0, 30.0), (30.2, 0.05)])
    assert waits[1] <= MOST_OWED_S + LAYER_S + FIXED_S + 1e-9
    turns = PartTurns()
    assert not turns.part_first
    turns.begin(0.0, False, False)
    turns.end(9.0)
    assert not turns.part_first, "no part waited"
    turns.begin(9.0, False, True)
    turns.end(9.3)
    assert turns.part_first
    turns.begin(10.0, True, False)
    turns.end(10.31)
    assert not turns.part_first


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 0.4)), max_size=40),
    st.floats(0.1, 12),
)
def test_all_are_computed_and_nobody_waits_for_longer_than_the_queue(shorts, part_s):
    waits, end, steps = computed(part_s, shorts)
    others_s = sum(seconds + FIXED_S for _, seconds in shorts)
    assert len(waits) == len(shorts)
    assert end <= part_s + steps * FIXED_S + others_s + 1e-6
    alone_s = sum(seconds for _, seconds in shorts)
    assert all(wait <= LAYER_S + FIXED_S + 2 * others_s + MOST_OWED_S + alone_s for wait in waits)


def test_who_is_let_in_when():
    turns = PartTurns()
    turns.begin(1.0, False, True)
    turns.end(1.3)
    turns.begin(2.0, True, False)
    assert turns.lets_in_at(higher=True, was_here=False) == 2.0
    assert turns.lets_in_at(higher=False, was_here=False) == pytest.approx(2.3), "the part is owed so much"
    assert turns.lets_in_at(higher=False, was_here=True) == pytest.approx(2.3)
    assert turns.lets_in_at(higher=True, was_here=True) == 2.0 + SLICE_S, "it could not run"
    turns.end(2.5)
    turns.begin(3.0, True, False)
    assert turns.lets_in_at(higher=False, was_here=False) == 3.0
    assert turns.lets_in_at(higher=False, was_here=True) == 3.0 + SLICE_S


def test_prompts_of_class_batch_get_less_for_a_while_after_the_last_of_a_higher_class():
    turns = PartTurns()
    assert turns.batch_s(0.0) == inf
    turns.seen_higher(5.0)
    assert turns.batch_s(5.0 + RECENT_S - 0.1) == SLICE_S and turns.batch_s(5.0 + RECENT_S) == inf


@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.booleans()), min_size=1, max_size=200))
def test_class_batch_loses_a_fifth_of_its_time_at_most(steps):
    """Although somebody comes in each step that could give way, or leave it out."""
    turns, now, lost, won = PartTurns(), 0.0, 0.0, 0.0
    for took, others in steps:
        turns.seen_higher(now)
        left_out, gives_way = others and turns.batch_may_lose, not others and turns.batch_gives_way(now)
        turns.begin(now, False, False, batch_runs=not others, batch_left_out=left_out)
        now += took
        turns.end(now, gives_way)
        lost += took * (left_out or gives_way)
        won += took * (not others and not gives_way)
    assert lost <= MOST_LOST_S + LOST_SHARE * won + max(took for took, _ in steps) + 1e-9


def test_without_a_higher_class_for_long_nothing_gives_way():
    turns = PartTurns()
    assert not turns.batch_gives_way(0.0)
    turns.seen_higher(10.0)
    assert turns.batch_gives_way(10.0 + GIVES_WAY_S - 1) and not turns.batch_gives_way(10.0 + GIVES_WAY_S)

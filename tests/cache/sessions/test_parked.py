"""What is due at the home of parked blocks."""

from __future__ import annotations

import math
from heapq import heapify

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sessions.parked import ParkedBlocks, Times

WAY = Times(0.0, 100.0, 130.0, 600.0)


def due(parked: ParkedBlocks[int], now: float) -> tuple[list[int], list[int], list[int]]:
    """Keys that move down, up, and that are over."""
    found = parked.due(now)
    over = sorted(parked.over(1000))
    return sorted(key for key, _ in found.down if key not in over), sorted(key for key, _ in found.up), over


def test_blocks_go_down_up_down_and_away():
    parked = ParkedBlocks[int]()
    parked.park(10.0, [1, 2], 7, WAY)
    assert parked.due(10.0).down == [(1, 100.0), (2, 100.0)], "wanted in 100 s"
    assert not parked.due(109.0)
    assert parked.due(110.0).up == [(1, 30.0), (2, 30.0)], "for 30 s"
    assert parked.due(140.0).down == [(1, math.inf), (2, math.inf)], "too late: nobody knows when"
    assert due(parked, 610.0) == ([], [], [1, 2])
    assert len(parked) == 0 and not parked.due(1e9) and parked.over(9) == []


def test_what_is_over_waits_for_the_tier_to_be_full_and_is_no_more_if_it_is_read():
    parked = ParkedBlocks[int]()
    parked.park(0.0, [1, 2, 3], 7, WAY)
    assert parked.due(600.0).down == [(key, math.inf) for key in (1, 2, 3)], "DRAM needs no such blocks"
    parked.used([2])
    assert parked.over(1) == [1]
    parked.park(700.0, [3], 7, WAY)
    assert parked.over(9) == []


def test_what_is_read_is_not_parked_until_the_next_turn_is_over():
    parked = ParkedBlocks[int]()
    parked.park(0.0, [1, 2, 3], 7, WAY)
    parked.due(0.0)
    parked.used([1, 2])
    assert due(parked, 100.0) == ([], [3], [])
    parked.park(110.0, [1, 2, 3, 4], 7, WAY)
    assert due(parked, 110.0) == ([1, 2, 3, 4], [], [])
    assert not parked.due(145.0), "the times of the turn before do not count any more"


def test_blocks_of_two_sessions_are_never_parked():
    parked = ParkedBlocks[int]()
    parked.park(0.0, [1, 2], 7, WAY)
    parked.park(0.0, [1, 3], 8, WAY)
    assert due(parked, 0.0) == ([2, 3], [], [])
    parked.park(1.0, [1, 2], 7, WAY)
    assert due(parked, 1.0) == ([2], [], [])


def test_of_several_times_that_have_passed_the_last_counts():
    parked = ParkedBlocks[int]()
    parked.park(0.0, [1], 7, WAY)
    assert due(parked, 120.0) == ([], [1], [])
    parked.park(200.0, [1], 7, WAY)
    assert due(parked, 1000.0) == ([], [], [1])


def test_owners_are_remembered_up_to_a_bound():
    parked = ParkedBlocks[int](owners_max=2)
    parked.park(0.0, [1, 2, 3], 7, WAY)
    parked.park(0.0, [1], 8, WAY)
    assert due(parked, 0.0)[0] == [1, 2, 3], "1 was forgotten"


events = st.lists(
    st.tuples(
        st.floats(0.0, 50.0), st.sampled_from(["park", "use", "due"]), st.sets(st.integers(0, 9)), st.integers(0, 3)
    ),
    max_size=80,
)


@given(events)
def test_only_parked_blocks_are_ever_due_and_nothing_is_left_at_the_end(played):
    parked, now, model, owner = ParkedBlocks[int](), 0.0, {}, {}
    for pause, what, keys, session in played:
        now += pause
        if what == "park":
            parked.park(now, sorted(keys), session, WAY)
            for key in keys:
                if owner.setdefault(key, session) != session:
                    owner[key] = None
                if owner[key] is None:
                    model.pop(key, None)
                else:
                    model[key] = now
        elif what == "use":
            parked.used(keys)
            for key in keys:
                model.pop(key, None)
        found = parked.due(now)
        over = parked.over(1000)
        assert set(over) == {key for key, at in model.items() if now - at >= WAY.over_s}
        for key, _ in [*found.down, *found.up]:
            assert key in model
        assert not {key for key, _ in found.up} & {*over}
        for key in over:
            del model[key]
        assert len(parked) == len(model)
    parked.due(now + WAY.over_s)
    assert len(parked) == 0 and not parked._order


def test_entries_of_turns_that_were_read_do_not_gather():
    parked = ParkedBlocks[int]()
    for turn in range(1000):
        parked.park(float(turn) / 100, [1], 7, WAY)
    assert len(parked._order) <= 100


def test_entries_are_thinned_out_at_a_constant_cost_per_turn(monkeypatch):
    kept = []
    monkeypatch.setattr("cache.sessions.parked.heapify", lambda order: kept.append(len(order)) or heapify(order))
    parked, sessions, turns = ParkedBlocks[int](), 1000, 10_000
    for turn in range(turns):
        parked.park(turn / 1000, [turn % sessions], turn % sessions, WAY)
    assert len(parked._order) <= 64 + 8 * sessions
    assert 0 < sum(kept) <= 4 * turns, "no more entries were looked at again than were added"


@pytest.mark.parametrize("keys", [[], [1]])
def test_nothing_that_is_parked_is_due_without_times(keys):
    parked = ParkedBlocks[int]()
    parked.park(0.0, keys, 7, Times(math.inf, math.inf, math.inf, math.inf))
    assert not parked.due(1e12)

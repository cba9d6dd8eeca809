"""The way of a session's KV between two turns follows from the prediction of its return."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.sessions.gaps import Return
from sched.sessions.parking import AWAY, CLASSES, OVER, PARKED, STAYS, ParkingRules, choose, narrowest, window

RULES = ParkingRules()

returns = st.builds(Return, st.floats(-5.0, 10.0), st.floats(0.05, 3.0), st.floats(0.0, 1.0))
rules = st.builds(
    ParkingRules,
    hold_s=st.floats(0.0, 100.0),
    window_s=st.floats(0.1, 100.0),
    least_hit=st.floats(0.01, 1.0),
    least_ttl_s=st.floats(1.0, 100.0),
    ttl_s=st.floats(100.0, 10_000.0),
)


def session(gap_s: float, spread: float, returning: float = 0.9) -> Return:
    return Return(math.log(gap_s), spread, returning)


@given(returns, rules)
def test_blocks_move_down_then_up_then_down_and_end(one, limits):
    way = choose(one, limits)
    assert way.name in CLASSES
    assert 0 <= way.down_s <= way.up_s <= way.late_s
    assert limits.least_ttl_s <= way.over_s <= limits.ttl_s
    assert way.down_s <= way.over_s
    assert (way.name == PARKED) == (way.up_s < math.inf)
    if way.name == PARKED:
        assert 0 < way.late_s - way.up_s <= limits.window_s + 1e-6 and way.late_s <= way.over_s + 1e-9
        assert one.by(way.late_s) - one.by(way.up_s) >= limits.least_hit - 1e-6
    if way.name == STAYS:
        assert one.quantile(0.5) <= limits.hold_s or narrowest(one, limits)[0] == 0
    elif way.name != OVER:
        assert way.down_s == 0


@given(returns, st.floats(0.1, 100.0))
def test_the_window_is_no_worse_than_others(one, seconds):
    begin_s, hit = window(one, seconds)
    assert 0 <= hit <= 1 + 1e-9
    for share in (0.25, 0.5, 0.75):
        other_s = one.quantile(share)
        assert hit >= one.by(other_s + seconds) - one.by(other_s) - 1e-9
    assert begin_s >= 0


def test_tool_calls_stay_people_are_parked_and_the_unpredictable_are_away():
    assert choose(session(1.0, 0.5), RULES).name == STAYS
    assert choose(session(120.0, 0.1), RULES).name == PARKED
    assert choose(session(600.0, 2.0), RULES).name == AWAY
    assert choose(session(120.0, 0.1, returning=0.01), RULES).name == OVER


def test_a_parked_session_comes_up_before_it_probably_returns():
    way = choose(session(120.0, 0.1), RULES)
    assert way.down_s == 0 and 90.0 < way.up_s < 120.0 < way.late_s < way.over_s


def test_who_stays_and_is_late_moves_down():
    way = choose(session(1.0, 0.5), RULES)
    assert RULES.hold_s <= way.down_s < way.over_s


def test_the_less_a_session_returns_the_sooner_its_blocks_go():
    ends = [choose(session(30.0, 1.0, share), RULES).over_s for share in (0.05, 0.2, 0.5, 0.95)]
    assert ends == sorted(ends) and ends[0] < ends[-1] / 2


@pytest.mark.parametrize(
    "wrong", [{"hold_s": -1.0}, {"window_s": 0.0}, {"least_hit": 0.0}, {"ttl_s": 10.0}, {"least_ttl_s": 0.0}]
)
def test_rules_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"sessions|time to live"):
        ParkingRules(**wrong)

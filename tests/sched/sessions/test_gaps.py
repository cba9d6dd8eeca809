"""Predictions of returns: what they mean, what they learn, and that memory is bounded."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.sessions.gaps import ENDS_LEAST, FIRST_GAP_S, LEAST_RETURN, Gaps, Return

returns = st.builds(
    Return, st.floats(-5.0, 10.0), st.floats(0.05, 3.0), st.floats(0.0, 1.0).map(lambda share: round(share, 3))
)
seconds = st.floats(0.0, 1e6)


@given(returns, seconds, seconds)
def test_a_session_that_waited_longer_has_returned_or_is_less_likely_to(one, a, b):
    short, long = sorted((a, b))
    assert 0 <= one.by(short) <= one.by(long) <= one.returns + 1e-9
    assert one.returns + 1e-9 >= one.still(short) >= one.still(long) - 1e-9 >= -1e-9


@given(returns, st.floats(0.01, 0.99))
def test_a_quantile_is_when_that_share_has_returned(one, share):
    assert one.by(one.quantile(share)) == pytest.approx(one.returns * share, abs=1e-6)


@given(returns, st.floats(0.01, 0.5))
def test_after_the_end_so_few_return(one, least):
    over_s = one.over_s(least)
    if one.returns <= least:
        assert over_s == 0
    elif over_s == math.inf:
        assert one.returns == 1, "only a session that surely returns is waited for without an end"
    elif over_s > 1e-6:
        assert one.still(over_s) == pytest.approx(least, abs=1e-4)


def play(gaps: Gaps, rng: Random, sessions: dict[str, tuple[float, float]], turns: int) -> dict[str, Return]:
    """Every session takes its turns; its gaps are exp(normal(median, spread)). The last prediction of each."""
    now, told = 0.0, {}
    for name, (median_s, spread) in sessions.items():
        for _ in range(turns):
            gaps.arrived(now, name)
            told[name] = gaps.left(now + 1.0, name)
            now += 1.0 + rng.lognormvariate(math.log(median_s), spread)
    return told


def test_before_anything_is_known_a_session_is_like_any():
    gaps = Gaps()
    gaps.arrived(0.0, "a")
    first = gaps.left(1.0, "a")
    assert first.quantile(0.5) == pytest.approx(FIRST_GAP_S)
    assert first.returns == 0.5


@given(st.integers(0, 1000), st.floats(2.0, 300.0))
def test_a_session_with_a_habit_is_predicted_by_it(seed, median_s):
    gaps = Gaps()
    others = {f"other {i}": (20.0, 1.0) for i in range(30)}
    told = play(gaps, Random(seed), others | {"regular": (median_s, 0.05)}, 6)
    found = told["regular"].quantile(0.5)
    between = sorted((median_s, 20.0))
    assert between[0] * 0.6 <= found <= between[1] * 1.7
    assert abs(math.log(found / median_s)) <= abs(math.log(20.0 / median_s)) / 3 + 0.3


def test_the_spread_is_that_of_the_errors():
    steady = play(Gaps(), Random(1), {f"s{i}": (30.0, 0.1) for i in range(200)}, 5)["s199"]
    wild = play(Gaps(), Random(1), {f"s{i}": (30.0, 1.5) for i in range(200)}, 5)["s199"]
    assert steady.log_spread < 0.3
    assert 1.2 < wild.log_spread < 2.2


def test_the_share_of_sessions_that_return_is_learned_by_turn():
    gaps, now, told = Gaps(), 0.0, []
    for number in range(400):
        for turn in range(2 if number % 4 == 0 else 1):
            gaps.arrived(now, number)
            told.append((turn, gaps.left(now + 1.0, number)))
            now += 6.0
    gaps.arrived(now + 1e6, "last")
    first = gaps.left(now + 1e6, "last")
    assert first.returns == pytest.approx(0.25, abs=0.05)
    assert [one for turn, one in told if turn == 1][-1].returns < 0.1


def test_who_returns_after_it_was_given_up_is_counted_and_teaches_long_gaps():
    """Otherwise gaps that are longer than any before would never be learned."""
    gaps, now, day = Gaps(), 0.0, 86_400.0
    for number in range(100):
        gaps.arrived(now, number)
        gaps.left(now + 1.0, number)
        gaps.arrived(now + day, number)
        found = gaps.left(now + day + 1.0, number)
        now += 10 * day
    gaps.arrived(now, "new")
    new = gaps.left(now, "new")
    assert new.returns > 0.7
    assert new.quantile(0.5) > 0.3 * day
    assert found.returns <= LEAST_RETURN and found.over_s(LEAST_RETURN) == 0, "nobody came a third time"


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 40), st.booleans()), max_size=200))
def test_memory_is_bounded_and_any_order_of_turns_is_taken(events):
    gaps, now = Gaps(sessions_max=8), 0.0
    for pause, session, ends in events:
        now += pause
        gaps.arrived(now, session)
        assert len(gaps) <= 8
        if ends:
            found = gaps.left(now, session)
            assert 0 <= found.returns <= 1 and found.log_spread > 0 and math.isfinite(found.log_mean)
    with pytest.raises(KeyError):
        gaps.left(now, "unknown")


def test_turns_of_few_sessions_do_not_pile_up():
    """A session that returns leaves an entry among those that may end, which would stay for as long as gaps may be."""
    print("seed 5")
    random, gaps, now = Random(5), Gaps(sessions_max=100), 0.0
    for turn in range(5000):
        now += random.lognormvariate(3.5, 2)
        gaps.arrived(now, turn % 100)
        gaps.left(now, turn % 100)
        assert len(gaps._ends) <= ENDS_LEAST + 2 * 100 + 1

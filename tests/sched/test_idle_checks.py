"""When an idle node measures again: soon, then rarely, never for long, and not beside requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.idle_checks import FIRST_S, LONGEST_S, SETTLE_S, SHARE, WRONG, IdleChecks, Verdict, factor, wrong


def next_at(checks: IdleChecks, now: float) -> float:
    return now + checks.wait_s(now)


def test_the_pause_doubles_while_the_models_are_right_and_is_short_after_a_change():
    checks, now, pauses = IdleChecks(100.0), 100.0, []
    for verdict in [Verdict.RIGHT] * 9 + [Verdict.CUT, Verdict.WRONG, Verdict.RIGHT]:
        begin = next_at(checks, now)
        pauses.append(begin - now)
        now = begin + 0.01
        checks.ended(begin, now, verdict)
    assert pauses[:9] == pytest.approx([min(FIRST_S * 2**i, LONGEST_S) for i in range(9)])
    assert pauses[9:] == pytest.approx([LONGEST_S, LONGEST_S, FIRST_S])


def test_it_begins_only_when_requests_have_been_away_for_a_while():
    checks = IdleChecks(0.0)
    checks.busy(FIRST_S + 7)
    assert next_at(checks, FIRST_S + 7.2) == pytest.approx(FIRST_S + 7 + SETTLE_S)
    checks.busy(3.0)
    assert next_at(checks, FIRST_S + 7.5) == pytest.approx(FIRST_S + 7 + SETTLE_S), "an older request"
    assert checks.wait_s(1e6) == 0.0


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.sampled_from(Verdict), st.floats(0, 20)), min_size=1, max_size=60))
def test_it_takes_a_small_share_of_the_time_however_long_a_check_takes(checked):
    checks, now, spent, longest = IdleChecks(0.0), 0.0, 0.0, 0.0
    for seconds, verdict, asked in checked:
        checks.busy(now + asked)
        begin = max(now + asked, next_at(checks, now + asked))
        assert spent <= SHARE * begin + 1e-9
        now, spent, longest = begin + seconds, spent + seconds, max(longest, seconds)
        checks.ended(begin, now, verdict)
    assert spent <= SHARE * now + longest


def test_wrong_is_what_most_shapes_say():
    assert factor([(0.1, 0.2), (1.0, 2.0)]) == pytest.approx(2.0)
    assert factor([(0.1, 0.3), (0.3, 0.1)]) == pytest.approx(1.0)
    assert wrong([(1.0, 1.6)] * 2) and wrong([(1.6, 1.0)] * 2)
    assert not wrong([(1.0, WRONG - 0.01)] * 3) and not wrong([])
    assert not wrong([(1.0, 2.0), (1.0, 0.9)]), "one shape alone"
    assert wrong([(0.0, 0.1)]), "an estimate of nothing"

"""When a request is tried again: pure, in virtual time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.front.persistence import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FUTILE_ATTEMPTS, Persistence
from net.http.common.frontend import Choices


def tries(persistence: Persistence, begin: float) -> list[float]:
    """When it is tried if nobody ever takes it."""
    now, found = begin, [begin]
    while (pause := persistence.pause_s(now)) is not None:
        now += pause
        found.append(now)
    return found


def test_a_new_request_waits_its_bounded_time_and_one_that_begun_until_its_deadline():
    new = tries(Persistence(100.0, 700.0, 5.0), 100.0)
    assert new[-1] == 105.0
    begun = Persistence(100.0, 700.0, 5.0)
    begun.begun()
    assert tries(begun, 300.0)[-1] == 700.0


def test_a_request_that_is_not_to_wait_does_not():
    assert Persistence(100.0, 700.0, 0.0).pause_s(100.0) is None


@given(st.floats(0, 60), st.floats(1, 600), st.booleans())
def test_refusals_are_paced_and_the_time_is_used_up_to_its_end(patience, life, begun):
    persistence = Persistence(0.0, life, patience)
    if begun:
        persistence.begun()
    found = tries(persistence, 0.0)
    gaps = [b - a for a, b in pairwise(found)]
    assert all(gap <= LONGEST_PAUSE_S for gap in gaps)
    assert all(gap >= FIRST_PAUSE_S for gap in gaps[:-1]), "only the last one is cut, by the end"
    end = life if begun else min(life, patience)
    assert abs(found[-1] - end) < 1e-6 and len(found) <= 12 + end / LONGEST_PAUSE_S


def test_only_attempts_without_a_token_count():
    persistence = Persistence(0.0, 600.0, 5.0)
    assert all(persistence.failed(tokens) for tokens in range(1, 50)), "each brought a token"
    assert [persistence.failed(49) for _ in range(MAX_FUTILE_ATTEMPTS)] == [True] * (MAX_FUTILE_ATTEMPTS - 1) + [False]


def test_pauses_begin_short_again_after_a_node_took_it():
    persistence = Persistence(0.0, 600.0, 5.0)
    persistence.begun()
    for _ in range(8):
        persistence.pause_s(1.0)
    assert persistence.pause_s(1.0) == LONGEST_PAUSE_S
    persistence.begun()
    assert persistence.pause_s(1.0) == FIRST_PAUSE_S


def test_a_choice_waits_while_its_request_may_begin_and_until_its_deadline_once_it_has():
    whole = Choices()
    one, other = (Persistence(0.0, 600.0, 0.0, whole) for _ in range(2))
    assert one.pause_s(1.0) is None and not one.waits
    whole.trying = 1
    assert one.waits and not one.promised and one.pause_s(1.0) is not None
    whole.trying = 0
    other.begun()
    assert one.waits and one.promised and one.pause_s(1.0) is not None
    assert one.pause_s(600.0) is None

"""How long a home is waited for where another one could be asked."""

from hypothesis import given
from hypothesis import strategies as st

from cache.homes.pace import BUDGET, BUDGET_MAX, GIVE_UP_MIN_S, GIVE_UP_RATIO, Paces

WAITS = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=30)


@given(WAITS)
def test_patience_is_some_times_what_it_should_take_and_grows_with_what_was_given_up(waits):
    paces = Paces("me")
    for wait_s in waits:
        paces.started("a", 100)
        paces.ended("a", 100, wait_s, 1e-6)
    usual = paces.patience("a")
    assert usual is not None
    assert usual >= max(GIVE_UP_MIN_S, GIVE_UP_RATIO * paces.seconds("a", 0))
    assert usual <= max(GIVE_UP_MIN_S, 2.1 * GIVE_UP_RATIO * max(waits)), "no mean is above the longest wait"
    paces.given_up(0.0, "a", usual)
    after = paces.patience("a")
    assert after is not None and after >= GIVE_UP_RATIO * usual, (
        "a pool that is slow as a whole is not asked twice for long"
    )


def test_a_tenth_of_all_gets_may_be_given_up():
    paces, given_up, asked = Paces("me"), 0, 1000
    for _ in range(asked):
        if paces.patience("a") is not None:
            given_up += 1
            paces.given_up(0.0, "a", 0.0)
    assert given_up <= BUDGET * asked + BUDGET_MAX
    assert given_up >= BUDGET * asked * 0.9
    paces = Paces("me")
    assert all(paces.patience("a") is not None for _ in range(asked)), "patience alone costs nothing"

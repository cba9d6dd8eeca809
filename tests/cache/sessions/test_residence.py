"""How long a block that nobody reads stays, by the evictions of the last seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sessions.residence import WINDOW_S, Residence


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(3, 200))
def test_at_an_even_rate_it_is_the_size_over_the_rate(blocks, rate, seconds):
    residence = Residence(blocks)
    for now in range(seconds):
        residence.seen(float(now), rate * now)
    assert residence.seconds() == pytest.approx(blocks / rate)
    assert len(residence._looks) <= WINDOW_S + 2


def test_it_is_infinite_until_something_is_evicted_and_forgets_old_times():
    residence = Residence(100)
    assert residence.seconds() == math.inf
    residence.seen(0.0, 5)
    residence.seen(1.0, 5)
    assert residence.seconds() == math.inf, "what was evicted before is not known"
    for now in range(2, 100):
        residence.seen(float(now), 5 + 10 * min(now, 50))
    assert residence.seconds() == math.inf, "nothing in the last 20 s"


def test_looks_in_quick_succession_are_not_remembered():
    residence = Residence(100)
    for turn in range(1000):
        residence.seen(turn / 1000, turn)
    assert len(residence._looks) == 1

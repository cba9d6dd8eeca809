"""Clock offsets from round trips."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.front.clocks import Clocks


@given(st.floats(-100, 100), st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=20))
def test_the_estimate_is_as_close_as_it_says(offset, trips):
    clocks, now = Clocks(), 1000.0
    for there, back in trips:
        clocks.observe("b", now, now + there + back, now + there + offset, same_host=False)
        now += 1.0
    known = clocks.of(["b", "unknown"])
    assert list(known) == ["b"]
    assert abs(known["b"]["offset_s"] - offset) <= known["b"]["error_s"] + 1e-6


def test_a_shorter_round_trip_replaces_a_longer_one_but_not_the_reverse():
    clocks = Clocks()
    clocks.observe("b", 0.0, 1.0, 5.0, same_host=False)
    clocks.observe("b", 2.0, 2.1, 7.0, same_host=False)
    close = clocks.of(["b"])
    clocks.observe("b", 3.0, 4.0, 9.0, same_host=False)
    assert clocks.of(["b"]) == close and close["b"]["error_s"] < 0.051


def test_nodes_of_one_host_share_a_clock():
    clocks = Clocks()
    clocks.observe("b", 0.0, 1.0, 5.0, same_host=True)
    assert clocks.of(["b"]) == {"b": {"offset_s": 0.0, "error_s": 0.0}}


def test_a_clock_that_was_set_is_noticed_though_the_round_trip_is_longer():
    clocks = Clocks()
    clocks.observe("b", 1000.0, 1000.1, 1000.05, same_host=False)
    clocks.observe("b", 1001.0, 1001.2, 4601.1, same_host=False)  # theirs, an hour forward
    assert abs(clocks.of(["b"])["b"]["offset_s"] - 3600.0) < 0.01
    clocks.observe("b", -2598.0, -2597.7, 4602.15, same_host=False)  # ours, an hour back
    assert abs(clocks.of(["b"])["b"]["offset_s"] - 7200.0) < 0.01
    clocks.observe("b", -2597.0, -2596.7, -2596.85, same_host=False)  # theirs, both hours back
    assert abs(clocks.of(["b"])["b"]["offset_s"]) < 0.01

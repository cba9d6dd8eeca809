"""What measured links learn from."""

from __future__ import annotations

import pytest

from sched.placement.links import distance
from sched.placement.measured_links import MeasuredLinks


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 0.0), (0, 1.0), (1000, 0.0)])
def test_a_transfer_of_nothing_leaves_a_path_unused(nbytes, seconds):
    """Else its prior of 1 GB/s would hide the rates of its rails for ever: no fetch pays, and no fetch is measured."""
    links = MeasuredLinks()
    links.reported("b", 80e9, {"c": 40e9})
    before = list(links.fetch_each(["b"])), list(links.handover_each("b", ["c"]))
    links.fetched("b", nbytes, seconds)
    links.handed_over("b", "c", nbytes, seconds)
    assert (list(links.fetch_each(["b"])), list(links.handover_each("b", ["c"]))) == before
    assert before[0][1] == pytest.approx(1 / 80e9)
    links.fetched("b", 10**9, 1.0)
    assert list(links.fetch_each(["b"])) != before[0]


PLACES = {
    "a": ("p0", "r0", "h0"),
    "b": ("p0", "r0", "h0"),
    "c": ("p0", "r0", "h1"),
    "d": ("p0", "r1", "h2"),
    "e": ("p1",),
}


def test_an_unused_path_is_as_fast_as_paths_over_the_same_distance():
    links = MeasuredLinks()
    links.places = PLACES
    for _ in range(20):
        links.handed_over("a", "c", 10**9, 0.1)
        links.handed_over("a", "d", 10**9, 1.0)
    near, far = (list(links.handover_each("b", [node]))[1] for node in "cd")
    assert (near, far) == (pytest.approx(1e-10, rel=0.05), pytest.approx(1e-9, rel=0.05))
    links.places = {}
    assert list(links.handover_each("b", ["c"])) == list(links.handover_each("b", ["d"])), "the mean of all paths"


@pytest.mark.parametrize(("other", "levels"), [("b", 0), ("c", 1), ("d", 2), ("e", 3)])
def test_distance_is_the_height_of_the_common_switch(other, levels):
    assert distance(PLACES["a"], PLACES[other]) == distance(PLACES[other], PLACES["a"]) == levels

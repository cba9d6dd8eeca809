"""What measured links learn from."""

from __future__ import annotations

import pytest

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

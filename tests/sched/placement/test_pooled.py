"""A prefix on SSD: read, or computed from there on."""

from __future__ import annotations

import pytest

from sched.placement.pooled import PooledPrefix
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, node

WHOLE = PooledPrefix(tokens=1600, dram_tokens=600, ssd_tokens=500, ssd_s=0.25)


def view_of(*seconds_per_token: float) -> View:
    nodes = [node(f"n{i}", prefill=(9.0, slope, 0.0)) for i, slope in enumerate(seconds_per_token)]
    return View(NOW, [candidate for candidate, _ in nodes], FAST, 256)


@pytest.mark.parametrize(("slopes", "read"), [((1e-3,), True), ((2e-4, 1e-3), False), ((2.5e-4,), False)])
def test_the_quickest_node_says_whether_it_pays_to_wait_for_a_disk(slopes, read):
    """The 1,000 tokens behind those in DRAM count: what lies in DRAM behind the SSD cannot be used without it."""
    left = PooledPrefix(tokens=600, dram_tokens=600, ssd_tokens=0, ssd_s=0.0)
    assert WHOLE.worth_fetching(view_of(*slopes)) == (WHOLE if read else left)


def test_a_prefix_in_dram_is_always_fetched():
    warm = PooledPrefix(tokens=600, dram_tokens=600, ssd_tokens=0, ssd_s=0.0)
    assert warm.worth_fetching(view_of(0.0)) is warm

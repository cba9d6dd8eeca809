"""Which prefill nodes compute a long prompt together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.placement.groups import group as groups
from sched.placement.groups.group import Group, Helper, Prompt, worth_it
from sched.placement.groups.pipeline import layer_cuts, pipeline

COST = (0.002, 1e-3, 1e-8)
PROMPT = Prompt(num_tokens=8000, num_layers=30, chunk_tokens=1024, block_size=16, max_nodes=4)
ALONE_S = 8 * 0.002 + 8000 * 1e-3 + 8000 * 8000 * 1e-8


def best_group(lead: Helper, others: list[Helper], prompt: Prompt) -> Group | None:
    return groups.best_group(lead, others, prompt, pipeline)


def idle(name: str, wait_s: float = 0.0, prefix: int = 0, cost: tuple[float, float, float] = COST) -> Helper:
    return Helper(name, wait_s, cost, prefix)


def test_two_idle_nodes_take_little_more_than_half():
    group = best_group(idle("a"), [idle("b")], PROMPT)
    assert group is not None and group.nodes == ("a", "b") and group.cuts == (0, 15, 30)
    assert 0.5 * ALONE_S < group.ready_s < 0.6 * ALONE_S
    assert worth_it(group, ALONE_S, 0.1)


def test_more_idle_nodes_are_better_and_bounded():
    others = [idle(name) for name in "bcdefg"]
    group = best_group(idle("a"), others, PROMPT)
    assert group is not None and group.nodes == ("a", "b", "c", "d")
    assert group.prefill_s < 0.36 * ALONE_S


def test_a_busy_node_is_left_out():
    group = best_group(idle("a"), [idle("busy", wait_s=60.0), idle("b")], PROMPT)
    assert group is not None and group.nodes == ("a", "b")
    waits = best_group(idle("a"), [idle("busy", wait_s=60.0)], PROMPT)
    assert waits is not None and not worth_it(waits, ALONE_S, 0.1)


def test_a_short_rest_is_not_worth_a_group():
    short = Prompt(400, 30, 1024, 16, 4)
    group = best_group(idle("a"), [Helper("b", 0.0, COST, 0, hop_s=0.3)], short)
    assert group is not None and not worth_it(group, 0.4, 0.1)


def test_a_group_knows_the_shortest_prefix():
    group = best_group(idle("a", prefix=6400), [idle("b", prefix=1600)], PROMPT)
    assert group is not None and group.prefix_tokens == 1600


def test_a_slow_node_gets_fewer_layers():
    slow = (0.002, 3e-3, 3e-8)
    group = best_group(idle("a"), [idle("b", cost=slow)], PROMPT)
    assert group is not None
    first, second = group.cuts[1], 30 - group.cuts[1]
    assert first in (22, 23) and second == 30 - first


def test_no_group_of_one():
    assert best_group(idle("a"), [], PROMPT) is None
    assert best_group(idle("a"), [idle("b")], Prompt(8000, 1, 1024, 16, 4)) is None


@given(st.integers(1, 100), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_every_layer_has_one_stage_and_every_stage_a_layer(layers, speeds):
    if layers < len(speeds):
        with pytest.raises(ValueError, match="cannot be divided"):
            layer_cuts(layers, speeds)
        return
    cuts = layer_cuts(layers, speeds)
    assert cuts[0] == 0 and cuts[-1] == layers and len(cuts) == len(speeds) + 1
    assert all(a < b for a, b in pairwise(cuts))


def test_equal_nodes_have_equal_shares_whatever_their_fits_say():
    assert layer_cuts(30, [1.0, 1.7]) == (0, 15, 30)
    assert layer_cuts(30, [1.0, 3.0]) == (0, 8, 30)

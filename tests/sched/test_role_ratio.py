"""DOPD's rule: the target ratio follows predicted loads, and the controller gets there without taking a last node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.role_change import BOTH, WAIT_S, Seen
from sched.role_ratio import AHEAD, Forecast, OptimalRatio, in_nodes, prefill_nodes, role_policies
from tests.sched.test_role_change import DECODE, DWELL_S, PREFILL, node, run


def controllers(nodes: list[Seen]) -> dict[str, OptimalRatio]:
    return {one.node_id: OptimalRatio(one.node_id) for one in nodes}


def prefills(nodes: list[Seen]) -> int:
    return sum(one.does == PREFILL for one in nodes)


def test_a_forecast_goes_on_as_the_past_did():
    flat, rising = Forecast(), Forecast()
    for step in range(200):
        level, ahead = flat.add(3.0), rising.add(0.5 * step)
    assert level == pytest.approx(3.0)
    assert ahead == pytest.approx(0.5 * (199 + AHEAD), rel=0.02)
    falling = Forecast()
    assert min(falling.add(10.0 - step) for step in range(40)) == 0.0


def test_loads_in_nodes():
    nodes = [node("p", PREFILL, work_s=WAIT_S), node("q", PREFILL, work_s=3 * WAIT_S), node("d", DECODE, running=4)]
    assert in_nodes(nodes) == (pytest.approx(0.5 + 0.75), pytest.approx(0.4))
    full = replace(nodes[2], blocks_soon=9, blocks_total=10)
    assert in_nodes([full]) == (0.0, pytest.approx(0.9)), "memory is shorter than seats"


@seed(21)
@given(st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.integers(2, 64))
def test_the_ratio_of_nodes_is_that_of_the_loads(prefill, decode, count):
    if prefill + decode == 0:
        return
    found = prefill_nodes(prefill, decode, count)
    assert 1 <= found <= count - 1
    assert found in (1, count - 1) or abs(found / count - prefill / (prefill + decode)) <= 0.5 / count + 1e-9


def test_nodes_move_to_the_stage_that_is_short_and_stop_at_the_ratio():
    busy = [node(f"p{i}", PREFILL, work_s=9 * WAIT_S) for i in range(2)]
    idle = [node(f"d{i}", DECODE, running=1) for i in range(6)]
    nodes = busy + idle
    changes, after, _ = run(nodes, 20 * DWELL_S, controllers(nodes))
    assert prefill_nodes(*in_nodes(nodes), 8) == 6, "1.8 nodes of prefill, 0.6 of decode"
    assert prefills(after) > 2 and changes[0][2] in (frozenset(), PREFILL)


def test_at_the_ratio_or_without_load_nothing_changes():
    nodes = [node("p", PREFILL, work_s=WAIT_S), node("d", DECODE, running=5)]
    assert run(nodes, 5 * DWELL_S, controllers(nodes))[0] == []
    calm = [node("p", PREFILL), *[node(f"d{i}", DECODE, running=1) for i in range(4)]]
    assert run(calm, 5 * DWELL_S, controllers(calm))[0] == [], "0.4 nodes of load say nothing"
    both = [node(name, BOTH, work_s=99.0) for name in "abc"]
    assert run(both, 5 * DWELL_S, controllers(both))[0] == []


@seed(22)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([PREFILL, DECODE, BOTH]), st.floats(0, 30), st.integers(0, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_a_stage_keeps_a_node(states):
    nodes = [node(f"n{i}", does, work, running) for i, (does, work, running) in enumerate(states)]
    had = {role for one in nodes for role in one.does}
    made = controllers(nodes)
    current = list(nodes)
    for second in range(int(3 * DWELL_S)):
        for i, one in enumerate(current):
            does = made[one.node_id].step(float(second), current)
            if does is not None:
                current[i] = replace(one, does=does)
        assert had <= {role for one in current for role in one.does}


def test_both_rules_have_a_name():
    assert set(role_policies) == {"threshold", "dopd"}
    assert isinstance(role_policies["dopd"]("a", 15.0), OptimalRatio)

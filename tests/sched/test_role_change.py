from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sched.role_change import (
    BOTH,
    CELL_PAUSE_HOLDS,
    DRAIN_HOLDS,
    HOLD_S,
    NODE_PAUSE_HOLDS,
    RoleController,
    Seen,
    loads,
    wanted,
)

REST_S, DWELL_S = CELL_PAUSE_HOLDS * HOLD_S, NODE_PAUSE_HOLDS * HOLD_S
PREFILL, DECODE = frozenset({"prefill"}), frozenset({"decode"})


def node(name: str, does: frozenset[str] = BOTH, work_s: float = 0.0, running: int = 0, can=BOTH) -> Seen:
    return Seen(name, can, does, work_s, running, 10)


def run(nodes: list[Seen], seconds: float, controllers=None, begin: float = 0.0):
    """All nodes step every second with the same records; changes show at once. [(when, node, does)]"""
    controllers = controllers or {n.node_id: RoleController(n.node_id) for n in nodes}
    changes, nodes = [], list(nodes)
    for second in range(int(seconds)):
        for i, one in enumerate(nodes):
            does = controllers[one.node_id].step(begin + second, nodes)
            if does is not None:
                changes.append((begin + second, one.node_id, does))
                nodes[i] = replace(one, does=does)
    return changes, nodes, controllers


def test_a_busy_stage_gets_nodes_of_the_other_after_a_while_and_then_the_cell_rests():
    changes, nodes, _ = run([node(name, DECODE, work_s=4.0) for name in "abcd"] + [node("p", PREFILL)], 150)
    done = [(when, does) for when, _, does in changes if does]
    assert len(done) >= 2 and {does for _, does in done} == {PREFILL}
    assert done[0][0] >= HOLD_S and all(b - a >= REST_S for (a, _), (b, _) in pairwise(done))
    assert sum(one.does == DECODE for one in nodes) >= 1


def test_nodes_that_do_both_stay():
    assert run([node(name, work_s=9.0) for name in "abc"], 200)[0] == []


def test_a_short_burst_changes_nothing():
    busy, idle = ([node(n, DECODE, work_s=w) for n in "abc"] + [node("p", PREFILL)] for w in (4.0, 0.0))
    busy, idle = ([replace(one, home=one.does) for one in nodes] for nodes in (busy, idle))
    changes, _, controllers = run(busy, HOLD_S - 1)
    later, _, controllers = run(idle, 5, controllers, HOLD_S)
    again, _, _ = run(busy, HOLD_S - 1, controllers, HOLD_S + 5)
    assert changes == later == again == []


def test_who_gave_up_a_role_takes_it_back_when_it_is_needed_or_all_is_calm():
    narrow = [node("a", PREFILL), node("b", DECODE, can=DECODE, running=10), node("c", PREFILL, can=PREFILL)]
    assert wanted(narrow) == ("a", DECODE)
    calm = [replace(node("a", DECODE), home=PREFILL), node("b", DECODE, can=DECODE)]
    assert wanted([*calm, node("c", PREFILL, can=PREFILL)]) == ("a", PREFILL)
    changes, _, _ = run(narrow, DWELL_S)
    assert [(name, does) for _, name, does in changes] == [("a", frozenset()), ("a", DECODE)]


def test_a_node_finishes_what_it_gives_up_before_it_begins_with_the_other_stage():
    decoding = replace(node("a", DECODE, running=5), home=DECODE)
    nodes = [decoding, node("b", DECODE, can=DECODE), node("c", PREFILL, work_s=9.0, can=PREFILL)]
    controller = RoleController("a")
    told = {second: does for second in range(30) if (does := controller.step(second, nodes)) is not None}
    assert list(told.values()) == [frozenset()] and min(told) >= HOLD_S
    nodes[0] = replace(decoding, does=frozenset())
    assert controller.step(31, nodes) is None, "five requests still decode there"
    nodes[0] = replace(nodes[0], running_soon=1)
    assert controller.step(32, nodes) == PREFILL
    stuck = RoleController("a")
    layouts = [decoding, *nodes[1:]]
    times = []
    for second in range(200):
        if (does := stuck.step(second, layouts)) is not None:
            times.append((second, does))
            layouts[0] = replace(decoding, does=does)
    assert [does for _, does in times] == [frozenset(), PREFILL]
    assert times[1][0] - times[0][0] == DRAIN_HOLDS * HOLD_S, "it does not wait for ever"


def test_a_stage_that_can_spare_nobody_gives_nobody():
    nodes = [node("a", DECODE, running=6), node("b", DECODE, running=6), node("c", PREFILL, work_s=99.0)]
    assert wanted(nodes) is not None, "prompts wait for minutes"
    nodes[2] = replace(nodes[2], work_s=2.5)
    assert wanted(nodes) is None, "one decode node could not bear 12 of 10"
    assert wanted([*nodes[1:]]) is None, "nor may a stage lose its last node"


def test_kv_counts_where_it_is_scarcer_than_seats():
    assert math.isinf(loads([node("a", DECODE)]).prefill), "nobody does"
    full = [replace(one, blocks_soon=90, blocks_total=100) for one in (node("a", DECODE), node("b", DECODE))]
    assert loads([*full, node("c", PREFILL)]).decode == 0.9
    assert wanted([*full, node("c", PREFILL), node("d", PREFILL)])[1] == DECODE


def test_nodes_of_one_role_never_change():
    nodes = [node("p", PREFILL, work_s=90.0, can=PREFILL), node("d", DECODE, can=DECODE)]
    assert wanted(nodes) is None


def test_loads_count_work_everywhere_and_capacity_where_it_is():
    seen = loads([node("a", PREFILL, work_s=2.0, running=5), node("b", DECODE, work_s=2.0, running=1)])
    assert (seen.prefill, seen.decode) == (2.0, 0.6)


ROLES = st.sampled_from([BOTH, PREFILL, DECODE])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(ROLES, ROLES, st.floats(0, 50), st.integers(0, 10)), min_size=1, max_size=8))
def test_no_stage_loses_its_last_node_and_only_capable_nodes_change(drawn):
    nodes = [
        Seen(f"n{i}", can, (does & can) or can, work, running, 10) for i, (can, does, work, running) in enumerate(drawn)
    ]
    _, after, _ = run(nodes, 120)
    for role in BOTH:
        had = any(role in one.does for one in nodes)
        assert any(role in one.does for one in after) or not had
    assert all(one.does <= one.can and (one.does or one.can == BOTH) for one in after)

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sched.role_change import BOTH, DWELL, HOLD_S, REST, RoleController, Seen, loads, wanted

REST_S, DWELL_S = REST * HOLD_S, DWELL * HOLD_S
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


def test_a_busy_stage_gets_a_node_of_its_own_after_a_while_and_then_the_cell_rests():
    changes, nodes, _ = run([node(name, work_s=4.0) for name in "abcd"], 100)
    assert [does for _, _, does in changes] == [PREFILL, PREFILL, PREFILL][: len(changes)] and len(changes) >= 2
    times = [when for when, _, _ in changes]
    assert times[0] >= HOLD_S and all(b - a >= REST_S for a, b in pairwise(times))
    assert sum("decode" in one.does for one in nodes) >= 1


def test_a_short_burst_changes_nothing():
    busy, idle = [node(n, work_s=4.0) for n in "abc"], [node(n) for n in "abc"]
    changes, _, controllers = run(busy, HOLD_S - 1)
    later, _, controllers = run(idle, 5, controllers, HOLD_S)
    again, _, _ = run(busy, HOLD_S - 1, controllers, HOLD_S + 5)
    assert changes == later == again == []


def test_who_gave_up_a_role_takes_it_back_when_it_is_needed_or_all_is_calm():
    narrow = [node("a", PREFILL), node("b", DECODE, can=DECODE, running=10), node("c", PREFILL, can=PREFILL)]
    assert wanted(narrow) == ("a", BOTH)
    assert wanted([node("a", PREFILL), node("b")]) == ("a", BOTH)
    changes, _, _ = run(narrow, DWELL_S)
    assert [(name, does) for _, name, does in changes] == [("a", BOTH)]


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
    assert all(one.does <= one.can and one.does for one in after)

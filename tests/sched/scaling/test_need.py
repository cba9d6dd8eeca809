"""How many nodes a load needs: against known values, and more for more load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.classes import CLASSES
from sched.role_change import BOTH
from sched.scaling.bounds import Bounds, parse, role_name
from sched.scaling.need import NIC_BUSY, Need, NodeLoad

STANDARD = CLASSES["standard"]
PREFILL, DECODE, NONE = frozenset({"prefill"}), frozenset({"decode"}), frozenset[str]()


def node(can: frozenset[str], work_s: float = 0.0, running: int = 0, **more) -> NodeLoad:
    given = {"node_id": "n", "role": "r", "ready": True, "running_soon": running, "max_running": 64} | more
    return NodeLoad(can=can, does=can, work_s=work_s, running=running, **given)


def after(nodes: list[NodeLoad], seconds: int = 60) -> Need:
    need = Need(window_s=10.0)
    for second in range(seconds):
        need.observe(second, nodes)
    return need


def test_an_idle_role_needs_one_node():
    for can in (PREFILL, DECODE, BOTH, NONE):
        assert after([node(can)] * 3).nodes(STANDARD) == 1
        assert after([node(can, 1e-9)] * 3).nodes(STANDARD) == 1, "the rest of a sum is no work"


def test_work_that_waits_longer_than_the_objective_needs_nodes():
    """Each of two nodes has 30 s of work all the time: they are busy, and 50 s are late."""
    assert after([node(PREFILL, 1.0)] * 2).nodes(STANDARD) == 3
    assert after([node(PREFILL, 30.0)] * 2).nodes(STANDARD) >= 6


def test_work_that_grows_needs_nodes_before_it_is_late():
    """Two busy nodes, and four seconds of work more in each second."""
    patient, need = replace(STANDARD, ttft_s=1e4), Need(window_s=10.0)
    for second in range(100):
        need.observe(second, [node(PREFILL, 1 + 2.0 * second)] * 2)
    assert need.nodes(patient) in (6, 7)
    assert after([node(PREFILL, 30.0)] * 2).nodes(patient) == 3


def test_decode_needs_seats():
    assert after([node(DECODE, running=60)] * 2).nodes(STANDARD) == 3
    assert after([node(DECODE, running=64, waiting=100)] * 2).nodes(STANDARD) == 6


def test_decode_needs_blocks():
    full = node(DECODE, running=10, blocks_soon=90, blocks_total=100)
    assert after([full] * 2).nodes(STANDARD) == 3


def test_decode_needs_steps_within_the_objective():
    """A step takes 10 ms and 2 ms per request: 45 requests meet 100 ms."""

    def fitted(running: int) -> Need:
        need = Need(window_s=10.0)
        for second in range(200):
            batch = running - 10 + second % 20
            need.observe(second, [node(DECODE, running=batch, step_s=0.01 + 0.002 * (batch + 1))] * 4)
        return need

    assert fitted(30).nodes(STANDARD) == 4
    assert fitted(50).nodes(STANDARD) == 6
    slow = node(DECODE, running=8, step_s=9.0)
    hopeless = Need(window_s=10.0)
    for second in range(200):
        hopeless.observe(second, [slow, node(DECODE, running=4, step_s=8.0)])
    assert hopeless.nodes(STANDARD) == 1, "not one request meets it: more nodes do not help"


def test_a_store_needs_network():
    assert after([node(NONE, nic=0.9)] * 3).nodes(STANDARD) == 4
    assert after([node(NONE, nic=NIC_BUSY / 4)] * 4).nodes(STANDARD) == 1


def test_mixed_nodes_need_time_for_both():
    both = after([node(BOTH, 1.0, running=40)] * 4).nodes(STANDARD)
    assert both > after([node(PREFILL, 1.0)] * 4).nodes(STANDARD)


LOADS = st.lists(
    st.tuples(st.floats(0, 60), st.integers(0, 64), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1)),
    min_size=1,
    max_size=6,
)


@given(LOADS, st.sampled_from([PREFILL, DECODE, BOTH, NONE]), st.lists(st.floats(0.1, 5), min_size=2, max_size=2))
def test_more_load_never_needs_fewer_nodes(loads, can, factors):
    nodes = [node(can, work, running, waiting=waits, step_s=step, nic=nic) for work, running, waits, step, nic in loads]
    need = after(nodes, 20)
    less, more = sorted(factors)
    assert 1 <= need.nodes(STANDARD, less) <= need.nodes(STANDARD, more)


@given(LOADS, st.sampled_from([PREFILL, DECODE, BOTH]))
def test_a_node_that_drains_is_load_and_no_capacity(loads, can):
    nodes = [node(can, work, running, waiting=waits) for work, running, waits, _, _ in loads]
    leaving = node(can, 5.0, 8, draining=True)
    assert after([*nodes, leaving], 20).nodes(STANDARD) >= 1
    assert sum(one.takes for one in [*nodes, leaving]) == len(nodes)


def test_bounds_are_parsed():
    assert parse("prefill=1..4, decode = 2..8") == (Bounds("prefill", 1, 4), Bounds("decode", 2, 8))
    assert parse("decode+prefill=1..2")[0].role == "prefill+decode" == role_name(("decode", "prefill"))
    assert parse("mixed=1..2")[0].role == "mixed" == role_name(("store", "prefill", "decode"))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "names no role"),
        ("decode=4", "ROLE=LEAST..MOST"),
        ("decode=0..4", "at least 1"),
        ("decode=5..4", "between LEAST"),
        ("cook=1..4", "no role 'cook'"),
        ("decode=1..2,decode=1..3", "twice"),
    ],
)
def test_bounds_that_cannot_be(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse(text)

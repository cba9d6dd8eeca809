"""What the kill-roles scenario calls wrong, and whom its clients talk to."""

from __future__ import annotations

import pytest

from lab.faults.checks import differences, pause_rows
from lab.faults.client import Stream
from lab.faults.kill_roles import SHAPES
from lab.launch.nodes import parse_nodes


def test_what_is_wrong():
    calm = [Stream(tokens=[1, 2, 3]), Stream(tokens=[4])]
    assert differences("decode killed", calm, [Stream(tokens=[1, 2, 3]), Stream(tokens=[4])]) == []
    wrong = differences("decode killed", calm, [Stream(tokens=[1, 9, 3]), Stream(error="503: no")])
    assert "differs from token 1" in wrong[0] and "stream 1 failed: 503" in wrong[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_clients_reach_a_living_node_whoever_is_killed(shape):
    names = {name for name, _ in parse_nodes(shape.nodes)}
    for role, victim in shape.victims.items():
        first, other = shape.doors_of(role)
        assert {victim, first, other} <= names
        assert (victim == first) == (role == "acceptor")
        assert victim not in (first, other) or victim != (other if role == "acceptor" else first)


def test_pauses_count_from_the_death_on():
    streams = [Stream(at=[0.0, 5.0, 5.1, 5.4]), Stream(at=[4.0, 4.1]), Stream(begun=2.0, at=[6.0, 6.1])]
    rows = {row.metric: row.ours for row in pause_rows("decode killed", streams, 5.05)}
    assert rows["streams cut"] == 1.0 and abs(rows["longest pause p99"] - 0.3) < 1e-9
    assert abs(rows["longest wait for a first token"] - 0.95) < 1e-9

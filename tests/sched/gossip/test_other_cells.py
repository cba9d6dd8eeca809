"""Whom an acceptor asks outside its cell, by summaries, and in a virtual cluster of several cells."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, seed
from hypothesis import strategies as st

from sched.gossip.cells import SUMMARY, cell_of
from sched.gossip.other_cells import (
    ASKED_PER_ROLE,
    LEAST_DIFFERENCE_S,
    LEAST_DIFFERENCE_SHARE,
    better_cell,
    in_better_cell,
)
from sched.gossip.record import node_key
from sched.membership.member import Member, Status


def summaries(works: list[float]) -> np.ndarray:
    rows = np.zeros(len(works), SUMMARY)
    rows["cell"], rows["bits"], rows["nodes"] = np.arange(len(works)), 3, 100
    rows["work_mean_s"] = works
    return rows


@seed(1)
@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=8), st.integers(0, 7), st.integers(0, 1000))
def test_only_a_clearly_better_cell_is_asked(works, own, number):
    chosen = better_cell(summaries(works), own, random.Random(number))
    if chosen is None:
        return
    assert own < len(works) and chosen != own
    assert works[chosen] + max(LEAST_DIFFERENCE_S, LEAST_DIFFERENCE_SHARE * works[own]) <= works[own]


def test_the_better_of_two_cells_is_found_and_a_cell_nobody_told_of_is_not():
    assert better_cell(summaries([5.0, 1.0]), 0, random.Random(0)) == 1
    assert better_cell(summaries([1.0, 5.0]), 0, random.Random(0)) is None
    rows = summaries([5.0, 0.0])
    rows["nodes"][1] = 0
    assert better_cell(rows, 0, random.Random(0)) is None
    assert better_cell(summaries([5.0, 5.1, 1.0])[1:], 0, random.Random(0)) is None, "of the own cell nothing is told"


def test_nodes_of_both_roles_that_live_there_are_drawn():
    roles = (("prefill",), ("decode",), ("store",), ("prefill", "decode"))
    members = [Member(f"n{i}", ("h", 1), roles=roles[i % 4]) for i in range(400)]
    gone = [Member(m.node_id + "x", ("h", 1), roles=m.roles, status=Status.SUSPECT) for m in members]
    for number in range(20):
        rows = summaries([9.0] + [0.5] * 7)
        asked = in_better_cell(rows, 3, 0, members + gone, random.Random(number))
        cells = {cell_of(node_key(member.node_id), 3) for member in asked}
        assert len(cells) == 1 and 0 not in cells
        assert all(member.status is Status.ALIVE for member in asked)
        for role in ("prefill", "decode"):
            assert ASKED_PER_ROLE <= sum(role in member.roles for member in asked) <= 2 * ASKED_PER_ROLE
    assert in_better_cell(rows, 0, 0, members, random.Random(0)) == []

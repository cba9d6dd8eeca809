"""Whom to ask outside the own cell: records and digests stay within a cell, so what lies beyond is known by summaries.

Of two cells, the own one and one drawn, the less loaded is better than either alone nearly always (power of two
choices). A few of its nodes are drawn and asked beside the own shortlist: what they answer decides, so a summary that
is wrong or old costs a question, and acceptors that read the same summaries do not all send to the same node.
"""

from __future__ import annotations

from collections.abc import Sequence

from sched.cells import Rows, cell_of
from sched.member import Member, Rng, Status
from sched.record import node_key

DRAWN = 2
"""Nodes of each role that are asked."""

LEAST_S = 0.1
"""A cell is taken to be better if its nodes have less to do by this and by LESS of what the own nodes have."""

LESS = 0.25


def better_cell(summaries: Rows, own: int, rng: Rng) -> int | None:
    """One of the cells, drawn, if its mean work is clearly less than that of the cell `own`, which is one of
    `summaries`. A summary is not aged: what a cell has to do changes little while work keeps coming."""
    known = {int(row["cell"]): row for row in summaries if row["nodes"]}
    mine = known.pop(own, None)
    if mine is None or not known:
        return None
    drawn = known[rng.choice(sorted(known))]
    work_s = float(mine["work_mean_s"])
    better = float(drawn["work_mean_s"]) + max(LEAST_S, LESS * work_s) <= work_s
    return int(drawn["cell"]) if better else None


def elsewhere(summaries: Rows, bits: int, own: int, others: Sequence[Member], rng: Rng) -> list[Member]:
    """Members of a better cell to ask too: DRAWN that prefill and DRAWN that decode. `bits` of a node key name its
    cell, which is `own` here; empty while there is one cell only."""
    if not bits or (cell := better_cell(summaries, own, rng)) is None:
        return []
    there = [m for m in others if m.status is Status.ALIVE and cell_of(node_key(m.node_id), bits) == cell]
    drawn: dict[str, Member] = {}
    for role in ("prefill", "decode"):
        able = [member for member in there if role in member.roles]
        drawn |= {member.node_id: member for member in rng.sample(able, min(DRAWN, len(able)))}
    return list(drawn.values())

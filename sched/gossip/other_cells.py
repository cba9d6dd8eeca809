"""Chooses nodes to ask in another cell. Records and digests stay within a cell; only summaries leave it.

The acceptor compares its own cell with one random cell. The less loaded of the two is nearly always a good choice
(power of two choices). The acceptor then asks a few random nodes of that cell in addition to its own shortlist. Their
answers decide, so a wrong or old summary costs only a question, and acceptors with the same summaries do not all choose
the same node.
"""

from __future__ import annotations

from collections.abc import Sequence

from sched.gossip.cells import Rows, cell_of
from sched.gossip.record import node_key
from sched.membership.member import Member, Rng, Status

ASKED_PER_ROLE = 2
"""Number of nodes to ask per role."""

LEAST_DIFFERENCE_S = 0.1
"""Another cell counts as better if the mean work of its nodes is lower by at least this much, and by at least the share
LEAST_DIFFERENCE_SHARE of this cell's mean work."""

LEAST_DIFFERENCE_SHARE = 0.25


def better_cell(summaries: Rows, own: int, rng: Rng) -> int | None:
    """A random cell, if its mean work is clearly less than that of the cell `own`, which is one of `summaries`.
    Summaries are not aged, because the work of a cell changes little while requests keep arriving."""
    known = {int(row["cell"]): row for row in summaries if row["nodes"]}
    mine = known.pop(own, None)
    if mine is None or not known:
        return None
    drawn = known[rng.choice(sorted(known))]
    work_s = float(mine["work_mean_s"])
    better = float(drawn["work_mean_s"]) + max(LEAST_DIFFERENCE_S, LEAST_DIFFERENCE_SHARE * work_s) <= work_s
    return int(drawn["cell"]) if better else None


def in_better_cell(summaries: Rows, bits: int, own: int, others: Sequence[Member], rng: Rng) -> list[Member]:
    """Members of a better cell to ask, ASKED_PER_ROLE for each role. The first `bits` of a node key are its cell; this
    node's cell is `own`. Empty while there is only one cell."""
    if not bits or (cell := better_cell(summaries, own, rng)) is None:
        return []
    there = [m for m in others if m.status is Status.ALIVE and cell_of(node_key(m.node_id), bits) == cell]
    drawn: dict[str, Member] = {}
    for role in ("prefill", "decode"):
        able = [member for member in there if role in member.roles]
        drawn |= {member.node_id: member for member in rng.sample(able, min(ASKED_PER_ROLE, len(able)))}
    return list(drawn.values())

"""Whom this acceptor knows, in the form that placement wants: a view over the nodes of its cell, built from gossip once
in a while and used by all requests in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.block import BlockKey
from engine.serving.placed import ProbeAnswer
from net.gossip import Gossip
from sched.intents import Ring, ring_of
from sched.load_word import DRAINING
from sched.member import Member, Rng, Status
from sched.placements.arrivals import ArrivalRate
from sched.placements.links import Links, Vector
from sched.placements.match import Matcher
from sched.placements.view import View
from sched.record import RECORD

MOST_STRANGERS = 4
VIEW_S, VIEW_PER_NODE_S = 0.02, 2e-5
"""A view serves the decisions of so long, what those add is charged to it; building it costs about 1 us a node."""

COMPUTES = frozenset({"prefill", "decode"})


@dataclass(slots=True)
class Known:
    """Engine nodes of the own cell with their records, and others to ask."""

    view: View
    members: list[Member]  # in the order of the view
    strangers: list[Member]  # alive, but gossip has told no load of them yet; members of a cell with less to do
    places: npt.NDArray[np.intp]  # of the view's nodes among the holders of digests; -1 = no digest
    ring: Ring  # those that prefill, for sched/intents.py
    at: float

    def of(self, node_id: str, now: float) -> tuple[float, float] | None:
        """(wait_s, age_s) of a node by gossip."""
        i = self.view.index.get(node_id)
        if i is None:
            return None
        return max(0.0, float(self.view.work_until[i]) - now), float(self.view.age_s[i]) + now - self.at


class Neighbours:
    """Keeps the newest `Known`."""

    def __init__(self, gossip: Gossip, links: Links, max_waiting: int, rng: Rng) -> None:
        self.arrivals = ArrivalRate()
        self._gossip, self._links, self._max_waiting, self._rng = gossip, links, max_waiting, rng
        self._matcher = Matcher(lambda: gossip.core.digests.holders)
        self._known: Known | None = None

    def known(self, now: float) -> Known:
        known = self._known
        if known is None or now - known.at >= VIEW_S + VIEW_PER_NODE_S * len(known.members):
            known = self._known = self._build(now)
        return known

    def _build(self, now: float) -> Known:
        """Nodes still loading their model have no blocks: they are strangers. Those that drain are left out."""
        ids, records = self._gossip.table
        members = {member.node_id: member for member in (*self._gossip.core.mates(), self._gossip.me)}
        told = (records["blocks_total"] > 0) & (records["version"] > 0)
        leaving = (records["flags"] & DRAINING) > 0
        rows, here, strangers = [], [], []
        for row, (node_id, ready, leaves) in enumerate(zip(ids, told.tolist(), leaving.tolist(), strict=True)):
            member = members.get(node_id)
            if leaves or member is None or member.status is not Status.ALIVE or COMPUTES.isdisjoint(member.roles):
                continue
            if ready:
                rows.append(row)
                here.append(member)
            else:
                strangers.append(member)
        chosen = records[rows]
        age_s = float(chosen["age_s"].mean()) if here else 0.0
        expected = self.arrivals.per_s(now) * len(here) * age_s
        view = View.of_records(now, here, chosen, self._links, self._max_waiting, expected)
        index = self._gossip.core.digests.holders.index
        places = np.array([-1 if (at := index(m.node_id)) is None else at for m in here], dtype=np.intp)
        ring = ring_of(member.node_id for member in here if "prefill" in member.roles)
        asked = strangers[:MOST_STRANGERS] + self._gossip.elsewhere(self._rng)
        return Known(view, here, asked, places, ring, now)

    def matched(self, known: Known, keys: Sequence[BlockKey], block_size: int) -> Vector:
        """Leading tokens that each node of the view holds, as far as their digests tell."""
        depths = self._matcher.depths(keys, block_size) if keys else None
        return known.view.none if depths is None else depths.take(known.places)

    def answered(self, now: float, known: Known, answers: Mapping[str, ProbeAnswer], asked: bool) -> View:
        """A view of those that answered; of everybody by gossip when the policy asks nobody."""
        if not asked and known.members:
            return known.view.copy()
        return with_silent(self.view_of(now, answers), known.view)

    def view_of(self, now: float, answers: Mapping[str, ProbeAnswer]) -> View:
        """Of those that answered."""
        told = list(answers.values())
        records = np.frombuffer(bytearray(b"".join(answer.record for answer in told)), RECORD)
        records["work_s"] += [answer.claimed_s for answer in told]
        view = View.of_records(now, [answer.member for answer in told], records, self._links, self._max_waiting)
        for i, answer in enumerate(told):
            if answer.ahead is not None:
                view.step_soon_s[i], view.step_alone_s[i], view.decode_s[i] = answer.ahead
        return view

    def charge(self, known: Known, now: float, node: str, seconds: float, tokens: int) -> None:
        """So much prefill was sent to `node` by a decision on `known`; it counts in the newest view as well."""
        newest = known if self._known is None else self._known
        for one in (known,) if newest is known else (known, newest):
            one.view.charge(now, node, seconds, tokens)
        self._gossip.view.charge(node, seconds)


def with_silent(answered: View, gossiped: View) -> View:
    """Busy is not gone: where all nodes of a role were too slow to answer, what gossip told of them counts."""
    missing = np.zeros(len(gossiped), dtype=bool)
    for heard, told in ((answered.prefills, gossiped.prefills), (answered.decodes, gossiped.decodes)):
        if not heard.any():
            missing |= told
    if not missing.any():
        return answered
    silent = [i for i in np.flatnonzero(missing).tolist() if gossiped.ids[i] not in answered.index]
    return answered.beside(gossiped.only(silent))

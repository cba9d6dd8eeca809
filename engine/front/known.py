"""The nodes that this acceptor knows, as a view for placement. It covers the nodes of the cell. The acceptor rebuilds
it from gossip after 20 ms or more, and all requests in between use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.block import BlockGeometry, BlockKey
from cache.pool.borders import borders_of
from engine.front.placed import ProbeAnswer
from engine.unlike.nodes import UnlikeNodes
from net.gossip.driver import Gossip
from sched.gossip.intents import Ring, ring_of
from sched.gossip.load_word import CLOSED
from sched.gossip.record import RECORD
from sched.gossip.state import Records
from sched.membership.member import Member, Rng, Status
from sched.placement.arrivals import ArrivalRate
from sched.placement.links import Vector
from sched.placement.match import Matcher
from sched.placement.measured_links import MeasuredLinks
from sched.placement.view import View

MAX_STRANGERS = 4
VIEW_S, VIEW_PER_NODE_S = 0.02, 2e-5
"""Lifetime of a view: a constant part and a part per node. Decisions charge their work to the view. Building a view
costs about 1 us per node."""

COMPUTES = frozenset({"prefill", "decode"})


CONTEXT_TOKENS = "context_tokens"
"""Entry of a member's info: the longest prompt + output that its arena takes. It may be shorter than what acceptors
accept."""


def context_of(member: Member) -> float:
    """Infinite if the node does not tell."""
    told = member.info.get(CONTEXT_TOKENS)
    return told if type(told) is int and told > 0 else math.inf


@dataclass(slots=True)
class Known:
    """Engine nodes of this node's cell with their records, and other nodes to ask."""

    view: View
    members: list[Member]  # in the order of the view
    strangers: list[Member]  # alive nodes without a load record yet, and members of a less busy cell
    places: npt.NDArray[np.intp]  # index of the view's nodes among the holders of digests; -1 = no digest
    ring: Ring  # the prefill nodes, for sched/gossip/intents.py
    at: float
    sites: frozenset[str] = frozenset()  # of the members and the strangers
    shortest: float = math.inf  # context of the node with the shortest one, tokens

    def at_site(self, site: str) -> Known:
        """Only the nodes of this site. It shares no memory with this one."""
        strangers = [member for member in self.strangers if member.site == site]
        return self._only([i for i, member in enumerate(self.members) if member.site == site], strangers)

    def continuing(self, num_tokens: int) -> Known:
        """Only the nodes whose context has room for more than one token behind `num_tokens`; all nodes if those cannot
        prefill and decode."""
        if num_tokens + 1 < self.shortest:
            return self
        longer = [i for i, member in enumerate(self.members) if num_tokens + 1 < context_of(member)]
        view = self.view
        if not (view.prefills[longer].any() and view.decodes[longer].any()):
            return self
        return self._only(longer, [member for member in self.strangers if num_tokens + 1 < context_of(member)])

    def _only(self, indices: list[int], strangers: list[Member]) -> Known:
        members = [self.members[i] for i in indices]
        ring = ring_of(member.node_id for member in members if "prefill" in member.roles)
        view, places = self.view.only(indices), self.places[np.array(indices, dtype=np.intp)]
        sites = frozenset(member.site for member in (*members, *strangers))
        return Known(view, members, strangers, places, ring, self.at, sites, self.shortest)

    def of(self, node_id: str, now: float) -> tuple[float, float] | None:
        """(wait_s, age_s) of a node according to gossip."""
        i = self.view.index.get(node_id)
        if i is None:
            return None
        return max(0.0, float(self.view.work_until[i]) - now), float(self.view.age_s[i]) + now - self.at


@dataclass(frozen=True, slots=True)
class _Layout:
    """Maps rows of gossip's table to nodes. It stays valid until a member joins, leaves or changes."""

    mates: list[Member]  # the inputs of the layout: the fields up to `held`
    ids: list[str]
    have_record: npt.NDArray[np.bool_]
    flags: npt.NDArray[np.uint16]
    held: list[str | None]
    rows: npt.NDArray[np.intp]
    here: list[Member]
    strangers: list[Member]
    places: npt.NDArray[np.intp]
    ring: Ring
    sites: frozenset[str]
    shortest: float  # as in Known

    def holds(self, gossip: Gossip, ids: list[str], records: Records) -> bool:
        """Whether the inputs are unchanged."""
        return (
            self.mates is gossip.core.mates()
            and self.ids == ids
            and np.array_equal(self.have_record, _have_record(records))
            and np.array_equal(self.flags, records["flags"])
            and self.held == gossip.core.digests.holders.nodes
        )


def _lay_out(gossip: Gossip, ids: list[str], records: Records) -> _Layout:
    """Nodes that are still loading their model have no blocks, so they are strangers. Left out are nodes that drain
    or read weights, and suspected nodes whose roles other nodes have."""
    mates, holders = gossip.core.mates(), gossip.core.digests.holders
    members = {member.node_id: member for member in (*mates, gossip.me)}
    suspected = {name for name, member in members.items() if member.status is not Status.ALIVE}
    missing = COMPUTES.difference(*(m.roles for name, m in members.items() if name not in suspected))
    have_record, flags = _have_record(records), records["flags"].copy()
    rows, here, strangers = [], [], []
    for row, (node_id, ready, closed) in enumerate(
        zip(ids, have_record.tolist(), (flags & CLOSED).tolist(), strict=True)
    ):
        member = members.get(node_id)
        if closed or member is None or COMPUTES.isdisjoint(member.roles):
            continue
        if node_id in suspected and missing.isdisjoint(member.roles):
            continue
        if ready:
            rows.append(row)
            here.append(member)
        else:
            strangers.append(member)
    places = np.array([-1 if (at := holders.index(m.node_id)) is None else at for m in here], dtype=np.intp)
    ring = ring_of(member.node_id for member in here if "prefill" in member.roles)
    chosen = np.array(rows, dtype=np.intp)
    sites = frozenset(member.site for member in (*here, *strangers))
    shortest = min(map(context_of, (*here, *strangers)), default=math.inf)
    held = list(holders.nodes)
    return _Layout(mates, ids, have_record, flags, held, chosen, here, strangers, places, ring, sites, shortest)


def _have_record(records: Records) -> npt.NDArray[np.bool_]:
    """Which rows have a load record."""
    return np.asarray((records["blocks_total"] > 0) & (records["version"] > 0))


class Neighbours:
    """Keeps the newest `Known`."""

    def __init__(
        self,
        gossip: Gossip,
        links: MeasuredLinks,
        max_waiting: int,
        rng: Rng,
        geometry: BlockGeometry,
        *,
        tolls: bool = True,
    ) -> None:
        """geometry: of the cluster's blocks. tolls: see --placement-tolls."""
        self.unlike = UnlikeNodes((), geometry)
        self._geometry = geometry
        self.arrivals = ArrivalRate()
        self._gossip, self._links, self._max_waiting, self._rng = gossip, links, max_waiting, rng
        self._tolls = tolls
        self._matcher = Matcher(lambda: gossip.core.digests.holders, borders_of(geometry))
        self._layout: _Layout | None = None
        self._known: Known | None = None

    def known(self, now: float) -> Known:
        known = self._known
        if known is None or now - known.at >= VIEW_S + VIEW_PER_NODE_S * len(known.members):
            known = self._known = self._build(now)
        return known

    def _build(self, now: float) -> Known:
        ids, records = self._gossip.table
        layout = self._layout
        if layout is None or not layout.holds(self._gossip, ids, records):
            layout = self._layout = _lay_out(self._gossip, ids, records)
            self.unlike = UnlikeNodes((*layout.mates, self._gossip.me), self._geometry)
            self._links.forms = self.unlike if self.unlike.any else None
            everyone = (*layout.mates, self._gossip.me)
            self._links.places = {member.node_id: place for member in everyone if (place := member.place)}
        chosen = records[layout.rows]
        age_s = float(chosen["age_s"].mean()) if layout.here else 0.0
        expected = self.arrivals.per_s(now) * len(layout.here) * age_s
        view = View.of_records(now, layout.here, chosen, self._links, self._max_waiting, expected, tolls=self._tolls)
        elsewhere = self._gossip.elsewhere(self._rng)
        asked = layout.strangers[:MAX_STRANGERS] + elsewhere
        sites = layout.sites.union(member.site for member in elsewhere)
        shortest = min(map(context_of, elsewhere), default=layout.shortest)
        return Known(view, layout.here, asked, layout.places, layout.ring, now, sites, min(shortest, layout.shortest))

    def matched(self, known: Known, keys: Sequence[BlockKey], block_size: int) -> Vector:
        """Leading tokens after which each node of the view can go on, by its digest. Do not modify the result."""
        depths = self._matcher.depths(keys, block_size, known.places, self.unlike.each) if keys else None
        return known.view.none if depths is None else depths

    def answered(self, now: float, known: Known, answers: Mapping[str, ProbeAnswer], asked: bool) -> View:
        """A view of the nodes that answered; if the policy asks no node, a view of all nodes from gossip."""
        if not asked and known.members:
            return known.view.copy()
        return with_silent(self.view_of(now, answers), known.view)

    def view_of(self, now: float, answers: Mapping[str, ProbeAnswer]) -> View:
        """A view of the nodes that answered."""
        given = list(answers.values())
        records = np.frombuffer(bytearray(b"".join(answer.record for answer in given)), RECORD)
        records["work_s"] += [answer.claimed_s for answer in given]
        members = [answer.member for answer in given]
        view = View.of_records(now, members, records, self._links, self._max_waiting, tolls=self._tolls)
        for i, answer in enumerate(given):
            if answer.claimed_s and view.a1[i]:
                view.queued_tokens[i] += answer.claimed_s / view.a1[i]
            if answer.ahead is not None:
                view.step_soon_s[i], view.step_alone_s[i], view.decode_s[i] = answer.ahead
        return view

    def charge(self, known: Known, now: float, node: str, seconds: float, tokens: int) -> None:
        """Add the prefill work of a decision on `known` to `node`, in `known` and in the newest view."""
        newest = known if self._known is None else self._known
        for one in (known,) if newest is known else (known, newest):
            one.view.charge(now, node, seconds, tokens)
        self._gossip.view.charge(node, seconds)


def with_silent(answered: View, gossiped: View) -> View:
    """A busy node is not gone: if no node of a role answered in time, use the gossiped records of that role."""
    missing = np.zeros(len(gossiped), dtype=bool)
    for here, everywhere in ((answered.prefills, gossiped.prefills), (answered.decodes, gossiped.decodes)):
        if not here.any():
            missing |= everywhere
    if not missing.any():
        return answered
    silent = [i for i in np.flatnonzero(missing).tolist() if gossiped.ids[i] not in answered.index]
    return answered.joined_with(gossiped.only(silent))


def with_unasked(answered: View, gossiped: View) -> View:
    """All nodes: as they answered, and the others as gossip tells."""
    return answered.joined_with(gossiped.only([i for i, node in enumerate(gossiped.ids) if node not in answered.index]))

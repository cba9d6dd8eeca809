"""The acceptors' knowledge of the nodes, and their placement of requests: the classes of sched/ under virtual time.

An acceptor knows the records of all nodes of its cell as of the last gossip round that has arrived, digests as of
`digest_s` ago or as its own gossip core has them (--gossip-model), and the present state of the nodes that it probes. A
policy that probes all nodes is the central scheduler of the paper. Requests arrive at acceptors of all cells evenly, or
a share `entry_skew` of them at those of the first cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.simulator.acceptors import Acceptors
from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.links import SimLinks
from lab.simulator.models.caches import Directory
from lab.simulator.models.gossip import KINDS, Gossip
from lab.simulator.models.loop import Loop
from lab.simulator.rivals.table import placements
from net.user_file import chosen
from sched.admission import Limits
from sched.gossip.cells import SUMMARY, Rows, bits_for, cell_of
from sched.gossip.intents import WORTH_S, Coming, Intents, claimed_depths
from sched.gossip.other_cells import in_better_cell
from sched.gossip.record import node_key
from sched.membership.member import Member
from sched.placement.arrivals import ArrivalRate
from sched.placement.burst import Choice
from sched.placement.choice import Placement, PlacementPolicy, Rejected
from sched.placement.costs import horizon_s
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.table import METHODS
from sched.placement.two_stages import TwoStages
from sched.placement.view import Candidate, View


@dataclass(slots=True)
class Cell:
    """Nodes that know each other's records, and the last records they received."""

    number: int
    indices: npt.NDArray[np.intp]  # among all nodes
    view: View
    news: View | None = None  # of all nodes: they have arrived, but no decision has needed them yet


@dataclass(frozen=True, slots=True)
class Decision:
    """`view`: the basis of the placement, in `cell` (None: all nodes were probed); `questions`: round trips."""

    placement: Placement | Rejected
    view: View
    questions: int
    cell: Cell | None


@dataclass(frozen=True, slots=True)
class Answers:
    """What nodes say when they are asked.

    step_soon(node, seconds, tokens): the node's decode step after `seconds`, with one more request of `tokens` tokens.
    reused(job, found): the tokens that the job need not compute on a node that has its first `found` ones; None: all of
    these."""

    step_soon: Callable[[int, float, int], float]
    reused: Callable[[Job, int], int] | None


class Placing:
    """The placements of one run."""

    def __init__(
        self,
        config: SimConfig,
        loop: Loop,
        rng: Random,
        nodes: Sequence[Candidate],
        links: SimLinks,
        answers: Answers,
        equip: Callable[[PlacementPolicy], None],
    ) -> None:
        """equip(policy): called for every policy that is made."""
        size = len(nodes)
        self.config, self.loop, self.rng, self._links = config, loop, rng, links
        self._step_soon, self._reused = answers.step_soon, answers.reused
        self.exact = Directory(size)
        self.told = self._told([node.node_id for node in nodes])
        maker = chosen("--placement", config.placement, placements, METHODS)

        def make() -> TwoStages:
            made: TwoStages = maker(Limits(config.max_waiting), rng, config.threshold)
            equip(made)
            return made

        self.acceptors = Acceptors(make, size, config.seed)
        self.policy = self.acceptors.common
        self.arrivals = ArrivalRate()
        self.intents = Intents()
        tolls = config.tolls and getattr(self.policy, "tolls", False)  # files of users need none
        self.live = View(0.0, nodes, links, config.max_waiting, tolls=tolls)
        self._members = [Member(node.node_id, ("", 0), roles=node.roles) for node in nodes]
        keys = [node_key(node.node_id) for node in nodes]
        limit = config.cell_nodes or size
        self._bits = bits_for(np.array(keys, np.uint64), limit)
        cells = np.array([cell_of(key, self._bits) for key in keys])
        self._cells = [Cell(int(cell), np.flatnonzero(cells == cell), self.live) for cell in np.unique(cells)]
        self._news: tuple[npt.NDArray[Any], ...] | None = None
        self._summaries: Rows = np.zeros(0, SUMMARY)
        self._summed_at = float("-inf")
        self._tell(self.live.copy())

    def _told(self, names: Sequence[str]) -> Directory | Gossip:
        config, loop = self.config, self.loop
        if config.gossip_model not in KINDS:
            raise ValueError(f"--gossip-model must be one of {', '.join(KINDS)}, got {config.gossip_model!r}")
        if config.gossip_model == "fast":
            return Directory(len(names), config.digest_s)
        return Gossip(lambda: loop.now, names, config.cell_nodes or len(names), config.gossip_loss, config.seed)

    # --- gossip

    def told_all(self) -> None:
        """All nodes know the present state at once: at the beginning of a run."""
        self._measure_nics()
        self._tell(self.live.copy())

    def gossip(self) -> None:
        """One round: all nodes have the present records a little later; summaries of cells arrive less often."""
        self._measure_nics()
        if len(self._cells) == 1 and not self.config.gossip_loss:
            live = self.live
            news = live.table.copy(), live.prefills, live.decodes, live.nics
            self.loop.after(self.config.delivery_s, self._arrived, *news)
            return
        view = self.live.copy()
        if self.config.gossip_loss:
            lost = [i for i in range(len(view)) if self.rng.random() < self.config.gossip_loss]
            for cell in self._cells:
                inside = {int(i): place for place, i in enumerate(cell.indices)}
                kept = [i for i in lost if i in inside]
                view.keep(kept, self._known(cell), [inside[i] for i in kept])
        self.loop.after(self.config.delivery_s, self._tell, view)

    def _measure_nics(self) -> None:
        """Every node measures its own NIC, for its record."""
        if use := self._links.use():
            self.live.nics = np.array([use[node] for node in self.live.ids]).T

    def _arrived(self, *columns: npt.NDArray[Any]) -> None:
        """Most rounds are followed by the next before a decision, so a view is made only when a decision needs it."""
        self._news = columns

    def _known(self, cell: Cell) -> View:
        if self._news is not None:
            view = self.live.copy()
            view.table[:], view.prefills, view.decodes, view.nics = self._news
            cell.view, self._news = view, None
        if cell.news is not None:
            cell.view, cell.news = cell.news.only(cell.indices.tolist()), None
        return cell.view

    def _tell(self, view: View) -> None:
        if len(self._cells) == 1:
            self._cells[0].view = view
            return
        for cell in self._cells:
            cell.news = view
        if self.loop.now - self._summed_at >= self.config.cell_s:
            self._summed_at = self.loop.now
            self._summaries = np.concatenate([self._summary(cell, view) for cell in self._cells])

    def _summary(self, cell: Cell, view: View) -> Rows:
        """view: of all nodes."""
        row = np.zeros(1, SUMMARY)
        row["cell"], row["bits"], row["nodes"] = cell.number, self._bits, len(cell.indices)
        row["work_mean_s"] = np.maximum(view.work_until[cell.indices] - self.loop.now, 0.0).mean()
        return row

    def charge(self, cell: Cell | None, placement: Placement) -> None:
        """An acceptor sees only its own placements: one of as many acceptors as there are nodes."""
        if cell is not None:
            seconds = placement.estimates["prefill_s"] / len(cell.indices)
            cell.view.charge(self.loop.now, placement.prefill, seconds, 0)

    # --- decisions

    def decide(self, demand: Demand, job: Job) -> Decision:
        now = self.loop.now
        policy = self.acceptors.policy_for(job)
        if policy.asks_everybody:
            if self._links.asked(self.live.ids, every_s=self.config.gossip_s):
                self._measure_nics()
                self.live.forget_transfers()
            matched = self._matched(self.exact.depths(now, job.blocks), job)
            self._look_ahead(self.live, range(len(self.live)), demand, horizon_s(now, demand, self.live))
            return Decision(policy.place(now, demand, self.live, matched), self.live, 0, None)
        cell = self._entry()
        view, depths = self._heard(cell, job)
        matched = self._matched(depths, job)
        if len(self._cells) > 1:
            matched = matched[cell.indices]
        rate = self.arrivals.per_s(now) * len(view) / len(self.live)
        view.expected_arrivals = rate * (0.5 * self.config.gossip_s + self.config.delivery_s)
        asked = policy.shortlist(now, demand, view, matched)
        if not asked:
            return Decision(policy.place(now, demand, view, matched), view, 0, cell)
        chosen = cell.indices[list(asked)].tolist()
        for member in in_better_cell(self._summaries, self._bits, cell.number, self._members, self.rng):
            chosen.append(self.live.index[member.node_id])
        ahead_s = horizon_s(now, demand, view)
        choice = Choice(policy, now, demand, *self._asked(chosen, job, demand, ahead_s))
        decision, questions = choice.decide(), 1
        if self.config.intents and not isinstance(decision, Rejected) and decision.estimates["prefill_s"] > WORTH_S:
            questions = 2
            if coming := self._coming(demand, decision, job):
                absent = [self.live.index[node] for node in coming if node not in choice.view.index]
                choice.view, choice.matched = self._asked([*dict.fromkeys([*chosen, *absent])], job, demand, ahead_s)
                choice.expect(coming, self.config.block_tokens)
                decision = choice.decide()
        return Decision(decision, choice.view, questions, cell)

    def told_here(self, job: Job) -> tuple[View, Vector]:
        """All nodes as gossip tells them, and the tokens of the job that each has; of a cluster with one cell."""
        view, depths = self._heard(self._cells[0], job)
        return view, self._matched(depths, job)

    def _heard(self, cell: Cell, job: Job) -> tuple[View, Vector]:
        """What the acceptor knows from gossip: its view of the cell, and [all nodes] the leading blocks of the job."""
        view, told = self._known(cell), self.told
        if isinstance(told, Directory):
            return view, told.depths(self.loop.now, job.blocks)
        job.acceptor = told.acceptor(job.acceptor, cell.indices.tolist())
        if job.acceptor < 0:  # no node of the cell is up, and the first that returns knows no more
            return view, np.zeros(len(self.live))
        depths = told.depths(job.acceptor, job.blocks)
        told.accuracy.count(depths, self.exact.depths(self.loop.now, job.blocks))
        return self._present(view, cell, *told.absent(job.acceptor)), depths

    def _present(self, view: View, cell: Cell, dead: list[int], suspected: list[int]) -> View:
        """Without dead nodes, and without suspected ones if others have their roles (engine/front/known.py)."""
        if not dead and not suspected:
            return view
        for absent in ([*dead, *suspected], dead):
            gone = np.isin(cell.indices, absent)
            kept = view.copy()
            kept.prefills, kept.decodes = view.prefills & ~gone, view.decodes & ~gone
            kept.open_at[gone] = kept.closed_decode[gone] = np.inf
            if kept.prefills.any() and kept.decodes.any():
                break
        return kept

    def _matched(self, depths: Vector, job: Job) -> Vector:
        """Leading tokens of the job that each node need not compute; one is always left to compute. depths: the blocks
        that it has; the last block of a prompt may be partial."""
        size = self.config.block_tokens
        tokens: Vector = np.minimum(depths * size, float((job.input_tokens - 1) // size * size))
        reused = self._reused
        if reused is None:
            return tokens
        return np.array([reused(job, int(found)) for found in tokens.tolist()], dtype=np.float64)

    def _entry(self) -> Cell:
        """The cell of the acceptor that gets a request."""
        if len(self._cells) == 1 or self.rng.random() < self.config.entry_skew:
            return self._cells[0]
        return self.rng.choice(self._cells)

    def _asked(self, chosen: Sequence[int], job: Job, demand: Demand, ahead_s: float) -> tuple[View, Vector]:
        """The answers of these nodes; decode nodes answer for the time at which the prompt would arrive."""
        self._links.asked([self.live.ids[i] for i in chosen])
        found = self._matched(self.exact.depths(self.loop.now, job.blocks)[chosen], job)
        view = self.live.only(chosen)
        self._look_ahead(view, chosen, demand, ahead_s)
        return view, found

    def _look_ahead(self, view: View, nodes: Sequence[int], demand: Demand, seconds: float) -> None:
        """`nodes`: indices of the view's nodes among all. Skips nodes that are now slower than the best node will
        be."""
        view.step_soon_s[:] = 0.0
        if not self.config.decode_ahead:
            return
        best, need = math.inf, demand.num_blocks
        columns = zip(view.step_s.tolist(), view.closed_decode.tolist(), view.free_blocks.tolist(), strict=True)
        able = sorted((step, place, free) for place, (step, closed, free) in enumerate(columns) if not closed)
        for step, place, free in able:
            if step >= best:
                return
            soon = view.step_soon_s[place] = self._step_soon(nodes[place], seconds, demand.num_tokens)
            if free >= need:
                best = min(best, max(step, soon))

    def _coming(self, demand: Demand, decision: Placement, job: Job) -> dict[str, Coming]:
        """Leading blocks of the job that nodes already compute; if there are none, the chosen node claims them."""
        size = self.config.block_tokens
        depths = claimed_depths(decision.prefix_tokens // size, min(len(job.blocks), demand.usable_tokens // size))
        keys = [job.blocks[depth - 1] for depth in depths]
        coming = self.intents.claim(self.loop.now, keys, decision.prefill, decision.estimates["ttft_s"]) if keys else {}
        return {node: Coming(depths[found.depth - 1], found.ready_s) for node, found in coming.items()}

"""Decides how many ranks share the experts of a node, and which of them start and leave. Pure.

A node of W ranks counts as W nodes with its load: its queue is W seconds of one rank's work per second, and a request
that runs on it occupies all W. So the need is that of nodes of a role (sched/scaling/need.py), in ranks. Requests and
queues become shorter as steps become faster, so more ranks relieve seats and KV memory too. This takes prompts for the
work of ranks alone. Attention stays on one rank, so a further one helps less than that, and is followed by another if
it was not enough; and a rank that leaves takes less away than the rule expects.

In addition, ranks are needed for the decode steps: those with which the experts take what the rest of a step leaves of
the TBT objective, but no less than LEAST_LEFT of it. Until the experts' part of a step has been measured, it is all of
the step.

The first `least` ranks are the node's own affair: they count as ready and do not leave (engine/experts/group.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sched.scaling.crew import Crew, Drain, Effect, Present, Rules
from sched.scaling.need import IN_WINDOWS, MARGIN, Demand, NodeLoad, Smoothed

RANK = "expert-rank"
"""The role of a rank in the command's arguments."""

LEAST_LEFT = 0.25
"""Share of the TBT objective that experts may take, however long the rest of a step takes: no number of ranks shortens
that rest, so it must not demand any."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that joined as rank `number`. `name`: what it calls itself; `ready`: steps may use it."""

    number: int
    name: str
    ready: bool


class Width:
    """The ranks of one node. Call `step` at even intervals, several times per `out_s` of the rules, whose bounds are
    those of RANK."""

    def __init__(self, node_id: str, rules: Rules) -> None:
        (self._bounds,) = rules.bounds
        self._rules = rules
        self._demand = Demand(rules.out_s, rules.in_s)
        long_s = max(rules.out_s, rules.in_s / IN_WINDOWS)
        self._soon_s, self._long_s, self._rest_s = Smoothed(rules.out_s), Smoothed(long_s), Smoothed(long_s)
        self._crew = Crew(self._bounds, rules, f"{node_id}-rank-")
        self._leaving: set[str] = set()

    def step(self, now: float, node: NodeLoad, joined: Sequence[Rank], experts_s: float = 0.0) -> list[Effect]:
        """`node`: this one; `joined`: the ranks that are processes elsewhere; `experts_s`: seconds of a decode step for
        the experts, 0 = not known."""
        self._leaving &= {rank.name for rank in joined}
        members = self._members(joined)
        ready = {member.name for member in members if member.counts}
        experts_s = min(experts_s, node.step_s) if experts_s > 0 else node.step_s
        self._demand.observe(now, [replace(node, step_s=experts_s)] * len(ready))
        rank_s = len(ready) * experts_s if node.running else 0.0
        if node.running:
            self._rest_s.add(now, node.step_s - experts_s)
        self._soon_s.add(now, rank_s)
        self._long_s.add(now, rank_s)
        newest = sorted(joined, key=lambda rank: rank.number, reverse=True)
        leavers = [rank.name for rank in newest if rank.number >= self._bounds.least and rank.name in ready]
        effects = self._crew.step(now, members, self._need(len(ready)), leavers, set(), node.takes)
        self._leaving |= {effect.node for effect in effects if isinstance(effect, Drain)}
        return effects

    def failed(self, now: float, effect: Effect) -> None:
        """The command could not do this: try again later."""
        if isinstance(effect, Drain):
            self._leaving.discard(effect.node)
        else:
            self._crew.failed(now, effect)

    @property
    def counts(self) -> dict[str, int]:
        """Ranks that the load needs, ready ones, starting ones, draining ones."""
        return dict(self._crew.counts)

    @property
    def started(self) -> set[str]:
        """The processes that were started for this node, here or on their way."""
        return self._crew.started

    def _members(self, joined: Sequence[Rank]) -> list[Present]:
        """The names of those that a start named, and numbers of all others."""
        known = {rank.number: rank.name for rank in joined if self._crew.named(rank.name)}
        first = [Present(known.get(number, f"rank {number}"), True) for number in range(self._bounds.least)]
        return first + [
            Present(known.get(rank.number, f"rank {rank.number}"), rank.ready, rank.name in self._leaving)
            for rank in joined
            if rank.number >= self._bounds.least
        ]

    def _need(self, width: int) -> tuple[int, int]:
        """(ranks for the load, ranks for MARGIN more). The present steps count if these ranks are too slow for them."""
        tbt_s = self._rules.objective.tbt_s
        left_s = max(tbt_s - self._rest_s.mean, LEAST_LEFT * tbt_s)
        soon_s = self._soon_s.mean if self._soon_s.mean > width * left_s else 0.0
        need, spare = self._demand.nodes(replace(self._rules.objective, tbt_s=left_s))
        of_steps, with_more = max(soon_s, self._long_s.mean), max(soon_s, (1 + MARGIN) * self._long_s.mean)
        return max(need, math.ceil(of_steps / left_s)), max(spare, math.ceil(with_more / left_s))

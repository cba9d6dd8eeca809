"""A choice that can be made again when more is known: that some nodes are computing the prompt's new prefix already,
that others have announced work for the chosen one meanwhile, that a node has sent the prompt away.

A node that computes it now is as good as one that has it, once it is done. Waiting there takes about as long as
computing it anew on an idle node, so the least time to first token would have every node of the cluster compute it:
waiting may take SLACK times as long, and leaves the other nodes to other prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from sched.intents import Coming
from sched.placements.choice import Placement, PlacementPolicy, Rejected
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.view import View

SLACK = 1.5


@dataclass(slots=True)
class Choice:
    """What `policy` is asked about one request."""

    policy: PlacementPolicy
    now: float
    demand: Demand
    view: View
    matched: Vector  # [nodes of the view]: leading tokens of the prompt that each node has
    avoid: Collection[str] = ()  # nodes that have sent it away: taken again only if all others are much later
    computing: dict[str, Coming] = field(default_factory=dict)  # nodes that compute some of the others now
    _waits_s: dict[str, float] = field(default_factory=dict)  # for that, beyond the work they told of

    def expect(self, coming: Mapping[str, Coming], block_size: int) -> None:
        """These nodes are computing so many leading blocks of the prompt; it waits for them."""
        self.matched = self.matched.copy()
        for node, found in coming.items():
            tokens = min(found.depth * block_size, self.demand.usable_tokens)
            i = self.view.index.get(node)
            if i is not None and tokens > self.matched[i]:
                self.matched[i] = tokens
                self._waits_s[node] = self.view.wait(i, self.now, found.ready_s)
                self.computing[node] = found

    def announced(self, node: str, seconds: float) -> None:
        """So much more work has been announced to `node` than it told of. What is waited for may be a part of it, and
        counts once."""
        self.view.charge(self.now, node, max(0.0, seconds - self._waits_s.pop(node, 0.0)))

    def decide(self) -> Placement | Rejected:
        best = self._decide(self.view)
        if not any(node in self.view.index for node in self.avoid):
            return best
        others = self.view.copy()
        for node in self.avoid:
            others.close(node)
        return self._unless_late(self._decide(others), best)

    def _decide(self, view: View) -> Placement | Rejected:
        best = self.policy.place(self.now, self.demand, view, self.matched)
        if isinstance(best, Rejected) or not self.computing or best.prefill in self.computing:
            return best
        there = view.copy()
        there.open_at[np.array([node not in self.computing for node in there.ids])] = np.inf
        return self._unless_late(self.policy.place(self.now, self.demand, there, self.matched), best)

    def _unless_late(self, wanted: Placement | Rejected, best: Placement | Rejected) -> Placement | Rejected:
        """`wanted`, unless it is SLACK times as late as `best`."""
        if isinstance(wanted, Rejected) or isinstance(best, Rejected):
            return best
        return wanted if wanted.estimates["ttft_s"] <= SLACK * best.estimates["ttft_s"] else best

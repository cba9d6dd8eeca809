"""A choice that can be made again when more is known: that some nodes are computing the prompt's new prefix already.

A node that computes it now is as good as one that has it, once it is done. Waiting there takes about as long as
computing it anew on an idle node, so the least time to first token would have every node of the cluster compute it:
waiting may take SLACK times as long, and leaves the other nodes to other prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    computing: dict[str, Coming] = field(default_factory=dict)  # nodes that compute some of the others now

    def expect(self, coming: Mapping[str, Coming], block_size: int) -> None:
        """These nodes are computing so many leading blocks of the prompt; it waits for them."""
        self.matched = self.matched.copy()
        for node, found in coming.items():
            tokens = min(found.depth * block_size, self.demand.usable_tokens)
            i = self.view.index.get(node)
            if i is not None and tokens > self.matched[i]:
                self.matched[i] = tokens
                self.view.wait(i, self.now + found.ready_s)
                self.computing[node] = found

    def decide(self) -> Placement | Rejected:
        best = self.policy.place(self.now, self.demand, self.view, self.matched)
        if isinstance(best, Rejected) or not self.computing or best.prefill in self.computing:
            return best
        there = self.view.copy()
        elsewhere = np.array([node not in self.computing for node in there.ids])
        there.open_at[elsewhere] = np.inf
        waits = self.policy.place(self.now, self.demand, there, self.matched)
        if isinstance(waits, Rejected) or waits.estimates["ttft_s"] > SLACK * best.estimates["ttft_s"]:
            return best
        return waits

"""A choice that the acceptor can repeat with new information. The news is that a node already computes the prompt's
new prefix, that other acceptors have announced work for the chosen node, or that a node has sent the prompt away.

A node that computes the prefix now will soon hold it. Waiting for that node takes about as long as computing the prefix
again on an idle node. So if the least time to first token decided, every node of the cluster would compute the prefix.
Therefore waiting may take up to MAX_WAIT_RATIO times as long; this leaves the other nodes free for other prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sched.gossip.intents import Coming
from sched.placement.choice import Placement, PlacementPolicy, Rejected
from sched.placement.costs import prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View

MAX_WAIT_RATIO = 1.5


@dataclass(slots=True)
class Choice:
    """The inputs of `policy` for one request."""

    policy: PlacementPolicy
    now: float
    demand: Demand
    view: View
    matched: Vector  # [nodes of the view]: leading tokens of the prompt that each node holds
    avoid: Collection[str] = ()  # nodes that sent the prompt away: chosen again only if all others are much later
    computing: dict[str, Coming] = field(default_factory=dict)  # nodes that compute more leading tokens now
    _waits_s: dict[str, float] = field(default_factory=dict)  # waits for these nodes beyond their reported work

    def expect(self, coming: Mapping[str, Coming], block_size: int) -> None:
        """The nodes of `coming` compute leading blocks of the prompt; the prompt may wait for them."""
        self.matched = self.matched.copy()
        for node, found in coming.items():
            tokens = min(found.depth * block_size, self.demand.usable_tokens)
            i = self.view.index.get(node)
            if i is not None and tokens > self.matched[i]:
                self.matched[i] = tokens
                self._waits_s[node] = self.view.wait(i, self.now, found.ready_s)
                self.computing[node] = found

    def announced(self, node: str, seconds: float) -> None:
        """Others have announced `seconds` more work to `node` than it reported. A wait for that node may be part of
        this work, and counts once."""
        self.view.charge(self.now, node, max(0.0, seconds - self._waits_s.pop(node, 0.0)))

    def decide(self) -> Placement | Rejected:
        best = self._decide(self.view)
        if not any(node in self.view.index for node in self.avoid):
            return best
        others = self.view.copy()
        for node in self.avoid:
            others.close(node)
        return self._unless_late(self._decide(others), best)

    def on_one_node(self, decision: Placement) -> Placement:
        """`decision`, but the decode node computes the prompt too, if it takes prompts."""
        onto = self.view.index[decision.decode]
        row = prefill_costs(self.now, self.demand, self.view, self.matched, 1.0).row(onto)
        if decision.prefill == decision.decode or not self.view.prefills[onto] or row["skipped"]:
            return decision
        changed = {name: row[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")}
        return replace(
            decision,
            prefill=decision.decode,
            prefix_source=row["prefix_source"],
            prefix_tokens=row["prefix_tokens"],
            estimates=decision.estimates | changed | {"handover_s": 0.0},
        )

    def _decide(self, view: View) -> Placement | Rejected:
        best = self.policy.place(self.now, self.demand, view, self.matched)
        if isinstance(best, Rejected) or not self.computing or best.prefill in self.computing:
            return best
        there = view.copy()
        there.open_at[np.array([node not in self.computing for node in there.ids])] = np.inf
        return self._unless_late(self.policy.place(self.now, self.demand, there, self.matched), best)

    def _unless_late(self, wanted: Placement | Rejected, best: Placement | Rejected) -> Placement | Rejected:
        """`wanted`, unless it is more than MAX_WAIT_RATIO times as late as `best`."""
        if isinstance(wanted, Rejected) or isinstance(best, Rejected):
            return best
        return wanted if wanted.estimates["ttft_s"] <= MAX_WAIT_RATIO * best.estimates["ttft_s"] else best

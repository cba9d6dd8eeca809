"""Groups of prefill nodes for long prompts (--prefill-parallel): formed for each request, from gossip and load.

The policy of --placement chooses a prefill and a decode node as for any prompt. If the prompt is long, the prefill node
and others that are idle enough form a group when that promises the first token earlier (sched/placement/groups/).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.front.known import Known
from sched.placement.burst import Choice
from sched.placement.choice import Placement
from sched.placement.groups.group import Divide, Group, Helper, Prompt, best_group, worth_it
from sched.placement.links import Vector
from sched.placement.pooled import fetched
from sched.placement.view import View

MAX_FAILED_APART = 2
"""A request of which several nodes have failed to compute a token so often is computed by one node: by its decode node,
if that computes prompts."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """When groups form."""

    min_tokens: int  # --cpp-min-tokens
    max_nodes: int  # --cpp-max-nodes
    min_gain: float  # --cpp-min-gain
    num_layers: int  # of the model
    divide: Divide  # among the nodes of a group
    hop_bytes: int  # of a token that a node passes on at once: its hidden state, or its KV of a layer
    chunk_tokens: int  # the token budget of a step here; other nodes cut their chunks by their own

    def grouped(self, decision: Placement, choice: Choice, known: Known, fetches: bool) -> Placement:
        """`decision`, or the same request on a group. fetches: whether the nodes may fetch the prefix."""
        demand = choice.demand
        pooled = demand.pooled_tokens if fetches else 0
        held = max(pooled, decision.prefix_tokens)
        if demand.num_tokens - held < self.min_tokens:
            return decision
        helpers = self._helpers(choice, known, pooled, decision)
        first = helpers.pop(decision.prefill, None)
        if first is None and helpers:  # it would decode as well, or has no room
            first = helpers.pop(min(helpers, key=lambda node: (helpers[node].wait_s, node)))
        if first is None:
            return decision
        size = demand.block_size
        prompt = Prompt(demand.num_tokens, self.num_layers, self.chunk_tokens, size, self.max_nodes)
        group = best_group(first, list(helpers.values()), prompt, self.divide)
        if group is None:
            return decision
        longer_s = decision.estimates["transfer_s"] - group.fetch_s
        alone_s = decision.estimates["wait_s"] + self._alone_s(decision, choice) + longer_s
        if not worth_it(group, alone_s, self.min_gain):
            return decision
        return _on_group(decision, group, demand.fetch_from)

    def _alone_s(self, decision: Placement, choice: Choice) -> float:
        """Seconds of the prompt on one node: the estimate has one step, and the chunks of a group are many."""
        steps = -(-(choice.demand.num_tokens - decision.prefix_tokens) // self.chunk_tokens)
        fixed_s = float(choice.view.a0[choice.view.index[decision.prefill]])
        return decision.estimates["prefill_s"] + (steps - 1) * fixed_s

    def _helpers(self, choice: Choice, known: Known, pooled: int, decision: Placement) -> dict[str, Helper]:
        """All prefill nodes that can be a stage and have room for the prompt's blocks, except the decode node: by their
        answers, else by gossip."""
        answered, found, without = choice.view, dict[str, Helper](), {decision.decode, *choice.avoid}
        for view in (answered, known.view):
            hops_s = self._hops_s(view, decision.prefill)
            for i, node in enumerate(view.ids):
                if node in found or node in without or not self._able(view, i, choice):
                    continue
                held = int(choice.matched[i]) if view is answered else 0
                prefix, fetch_s = fetched(view, i, choice.demand, held) if pooled > held else (held, 0.0)
                found[node] = Helper(
                    node,
                    max(0.0, float(view.work_until[i]) - choice.now),
                    (float(view.a0[i]), float(view.a1[i]), float(view.a2[i])),
                    prefix,
                    float(hops_s[i]),
                    fetch_s,
                )
        return found

    def _able(self, view: View, i: int, choice: Choice) -> bool:
        demand = choice.demand
        fits = view.free_blocks[i] * demand.block_size >= demand.num_tokens
        able = view.prefills[i] and view.stages[i]
        return bool(able and fits and not view.obstacle(i, demand.num_tokens, demand.block_size))

    def _hops_s(self, view: View, source: str) -> Vector:
        """Seconds in which what a chunk passes on reaches each node, by the measured transfers of KV there."""
        latency_s, per_byte_s = view.handover(source)
        return latency_s + per_byte_s * float(self.chunk_tokens * self.hop_bytes)


def _on_group(decision: Placement, group: Group, fetch_from: str) -> Placement:
    estimates = decision.estimates
    changed = {
        "wait_s": group.wait_s,
        "transfer_s": group.fetch_s,
        "prefill_s": group.prefill_s,
        "ttft_s": group.ready_s + group.fetch_s,
    }
    return replace(
        decision,
        prefill=group.nodes[0],
        prefix_source=fetch_from if group.fetch_s else "local" if group.prefix_tokens else "none",
        prefix_tokens=group.prefix_tokens,
        estimates=estimates | changed,
        group=group,
    )

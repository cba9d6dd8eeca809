"""The common part of all policies: choose a prefill node, then a decode node for it. A policy is these two choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from sched.admission import Limits, retry_after_s
from sched.membership.member import Rng
from sched.placement.choice import Placement, Rejected, Stage
from sched.placement.costs import DecodeCosts, PrefillCosts, decode_costs, prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import QUEUE_FULL, View

T = TypeVar("T")


class TwoStages(ABC):
    """`threshold`: the policy considers a fetch only if the pool's prefix is longer than the node's own prefix by this
    factor. 1 = whenever it is longer, infinity = only on nodes without a prefix (the paper's
    kvcache_balancing_threshold)."""

    fetches = True  # prefixes may come from the pool
    asks_everybody = False  # ask all nodes, like a central scheduler
    tolls = False  # whether its views have tolls (view.py)

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5) -> None:
        if not threshold >= 1:
            raise ValueError(f"kvcache_balancing_threshold must be at least 1, got {threshold}")
        self.limits, self.rng, self.threshold = limits, rng, threshold

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        """Most policies ask no node and decide from gossip alone."""
        return range(len(view)) if self.asks_everybody else ()

    @abstractmethod
    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        """One of `able`, the prefill nodes that can take the request; never empty."""

    @abstractmethod
    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        """One of `able`, the decode nodes that can take it; never empty."""

    def place(self, now: float, demand: Demand, view: View, matched: Vector) -> Placement | Rejected:
        for role, column in (("prefill", view.prefills), ("decode", view.decodes)):
            if not column.any():
                return Rejected(f"no node with the role {role} is alive and ready", None, role)
        prefill = prefill_costs(now, demand, view, matched, self.threshold, self.fetches)
        able = prefill.able()
        if not able:
            return _rejected("prefill", prefill)
        source = self.choose_prefill(prefill, able)
        decode = decode_costs(demand, view, prefill, source)
        able = decode.able()
        if not able:
            return _rejected("decode", prefill, decode)
        return self._placed(prefill, source, decode, self.choose_decode(decode, able))

    def _placed(self, prefill: PrefillCosts, source: int, decode: DecodeCosts, target: int) -> Placement | Rejected:
        chosen, onto = prefill.row(source), decode.row(target)
        miss = self.limits.missed(chosen["ttft_s"], onto["step_s"])
        if miss is not None:
            return Rejected(miss, retry_after_s([(chosen["waiting"], chosen["wait_s"])]), stages=(prefill, decode))
        return Placement(
            prefill=chosen["node"],
            decode=onto["node"],
            prefix_source=chosen["prefix_source"],
            prefix_tokens=chosen["prefix_tokens"],
            estimates={name: chosen[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")}
            | {name: onto[name] for name in ("handover_s", "step_s")},
            stages=(prefill, decode),
        )

    def drawn(self, items: Sequence[T]) -> T:
        """A random one of equal candidates, so that acceptors with equal views do not all choose the same node."""
        return items[0] if len(items) == 1 else self.rng.choice(items)


def _rejected(stage: str, *stages: Stage) -> Rejected:
    """The last stage skipped all nodes, either permanently or until a queue has room."""
    full = [row for row in stages[-1].rows(len(stages[-1].view)) if row["skipped"] == QUEUE_FULL]
    if not full:
        return Rejected(f"the prompt is longer than the KV memory of every {stage} node", None, stages=stages)
    wait = retry_after_s((row["waiting"], row["wait_s"]) for row in full)
    return Rejected(f"the queues of all {stage} nodes are full", wait, stages=stages)

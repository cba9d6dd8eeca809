"""DynaServe: two nodes compute the prompt of a request, split at any block so that both are equally busy.

DynaServe (arXiv 2504.09285v2, adaptive request partitioning and scheduling) splits a request at any token into at most
two parts for two nodes that are alike. Its global scheduler chooses the two nodes and the split by the work that both
have then. With x tokens of the prompt on the first node:

    first(x)  = its work + prefill of x tokens after its own prefix                          rises with x
    second(x) = its work + prefill of the other tokens + its share of the decode steps       falls with x

where a decode step is shared by as many requests as run on a node on average. The split is the x with the least
max(first, second), by bisection. All of the prompt on the first node is plain disaggregation. If one node alone would
be done as early, the request stays there: plain colocation.

Kept: the two parts, and the split by load. The KV of the first part moves while it is computed. Batches are those of
--batching-policy; the paper's local schedulers bound the time of a step. Left out: splits inside the answer, because
nobody knows its length here (the paper predicts it), and splits inside a block. Nodes cannot do this: a request has one
prefill node, or a pipeline of nodes that split its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.central import CentralGreedy
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import PrefillCosts, decode_costs, least, prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View


@dataclass(slots=True)
class SplitPlacement(Placement):
    """`prefill` computes the first `split_tokens` tokens of the prompt, `decode` the rest and the answer. 0: `prefill`
    computes all of it."""

    split_tokens: int = 0


def split_point(first: Callable[[int], float], second: Callable[[int], float], lowest: int, highest: int) -> int:
    """The x from `lowest` to `highest` with the least max(first(x), second(x)). `first` does not fall, and `second`
    does not rise."""
    low, high = lowest, highest
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if first(middle) < second(middle) else (low, middle)
    if low > lowest and max(first(low - 1), second(low - 1)) < max(first(low), second(low)):
        return low - 1
    return low


class DynaServe(CentralGreedy):
    """The first node has the least TTFT for all of the prompt; the second one is another node, with the least work."""

    fetches, tolls = False, False

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5) -> None:
        super().__init__(limits, rng, threshold)
        # Node -> (when its part of a prompt can begin, seconds of that part): no queue has it before.
        self._owed: dict[str, list[tuple[float, float]]] = {}

    def place(self, now: float, demand: Demand, view: View, matched: Vector) -> Placement | Rejected:
        whole = super().place(now, demand, view, matched)
        if isinstance(whole, Rejected):
            return whole
        costs = prefill_costs(now, demand, view, matched, self.threshold, self.fetches)
        one, tokens, size = view.index[whole.prefill], demand.num_tokens, demand.block_size
        decode = decode_costs(demand, view, costs, one)
        able = [i for i in costs.able() if decode.decode_s[i] < np.inf and decode.headroom[i] >= 0]
        if not able:
            return whole
        decode_s = decode.token_s * demand.output_tokens / (float(view.running[able].mean()) + 1)
        work_s = costs.wait_s + self._owed_s(now, view)
        alone_s = work_s + costs.own_s + decode_s
        best = self.drawn(least(alone_s, able))
        others = [i for i in able if i != one]
        if not others:
            return self._on_one(costs, whole, best)
        two, own = self.drawn(least(work_s + decode_s, others)), int(matched[one])

        def first(blocks: int) -> float:
            return float(work_s[one]) + _prefill_s(view, one, own, min(tokens, size * blocks))

        def second(blocks: int) -> float:
            return float(work_s[two] + decode_s[two]) + _prefill_s(view, two, min(tokens, size * blocks), tokens)

        blocks = split_point(first, second, own // size + 1, -(-tokens // size))
        if float(alone_s[best]) <= max(first(blocks), second(blocks)):
            return self._on_one(costs, whole, best)
        split = min(tokens, size * blocks)
        wait_s, first_s = float(costs.wait_s[one]), _prefill_s(view, one, own, split)
        rest_s, ready_s = _prefill_s(view, two, split, tokens), wait_s + first_s
        if rest_s:
            self._owed.setdefault(view.ids[two], []).append((now + ready_s, rest_s))
        estimates = {
            "wait_s": wait_s,
            "transfer_s": 0.0,
            "prefill_s": first_s + rest_s,
            "ttft_s": max(ready_s, float(work_s[two]) if rest_s else 0.0) + rest_s,
            "handover_s": float(decode.handover_s[two]),
            "step_s": float(view.step_s[two]),
        }
        return SplitPlacement(
            view.ids[one],
            view.ids[two],
            "local" if own else "none",
            own,
            estimates,
            (costs, decode),
            split_tokens=split if rest_s else 0,
        )

    def _on_one(self, costs: PrefillCosts, whole: Placement, i: int) -> Placement:
        """All of the request on node `i`."""
        row, view = costs.row(i), costs.view
        estimates = {name: row[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")}
        estimates |= {"handover_s": 0.0, "step_s": float(view.step_s[i])}
        return Placement(view.ids[i], view.ids[i], row["prefix_source"], row["prefix_tokens"], estimates, whole.stages)

    def _owed_s(self, now: float, view: View) -> Vector:
        """Seconds of prefill that each node will get from parts that are not there yet."""
        self._owed = {node: left for node, parts in self._owed.items() if (left := [p for p in parts if p[0] > now])}
        return np.array([sum(seconds for _, seconds in self._owed.get(node, ())) for node in view.ids])


def _prefill_s(view: View, i: int, begin: int, end: int) -> float:
    """Seconds in which node `i` computes tokens `begin` to `end`; 0 for none."""
    if end <= begin:
        return 0.0
    linear, square = float(end - begin), float(end) ** 2 - float(begin) ** 2
    return float(view.a0[i] + view.a1[i] * linear + view.a2[i] * square)

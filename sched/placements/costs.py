"""Algorithm 1's estimates for every node of a view at once.

    TTFT    = queue + prefix transfer + prefill of what is left
    prefill = a0 + a1 (n - p) + a2 (n^2 - p^2)       n tokens, p of them known; (n - p)(n - p + 2 p) = n^2 - p^2

If the pooled store holds a prefix more than `threshold` times as long as the node's own, the node may fetch the
difference instead of computing it; the cheaper of both counts (papers.md section 3, step 3). In the paper the pool is
the DRAM of the prefill nodes and the longest match names one of them; here it is the pooled store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.view import Mask, View

Row = dict[str, Any]
"""One candidate at one stage, JSON-ready: stage, node, its estimates, and `skipped` with the reason if it cannot."""


@dataclass(slots=True)
class PrefillCosts:
    """Columns over the nodes of the view; `ttft_s` is infinite where the node cannot prefill this."""

    view: View
    demand: Demand
    local: Vector  # leading tokens cached on the node itself
    wait_s: Vector
    ttft_s: Vector
    own_s: Vector  # prefill behind the own prefix
    fetched: Mask | None  # the pool's prefix is fetched; None: nowhere
    transfer_s: Vector | None  # of that fetch
    rest_s: Vector | None  # prefill behind the fetched prefix

    def able(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.ttft_s < np.inf).tolist()
        return found

    def soonest_s(self) -> float:
        """Least TTFT, 0 when nobody can."""
        soonest = float(self.ttft_s.min(initial=np.inf))
        return soonest if soonest < np.inf else 0.0

    def fetches(self, i: int) -> bool:
        return self.fetched is not None and bool(self.fetched[i])

    def row(self, i: int) -> Row:
        """All of node `i`."""
        own, pooled = int(self.local[i]), self.demand.pooled_tokens
        transfer_s, prefill_s, prefix, source = 0.0, float(self.own_s[i]), own, "local" if own else "none"
        if self.fetches(i) and self.transfer_s is not None and self.rest_s is not None:
            transfer_s, prefill_s = float(self.transfer_s[i]), float(self.rest_s[i])
            prefix, source = pooled, "pool"
        wait_s = float(self.wait_s[i])
        return {
            "stage": "prefill",
            "node": self.view.ids[i],
            "skipped": self.view.obstacle(i, self.demand.num_tokens, self.demand.block_size),
            "waiting": int(self.view.waiting[i]),
            "wait_s": wait_s,
            "local_tokens": own,
            "pool_tokens": pooled,
            "prefix_source": source,
            "prefix_tokens": prefix,
            "transfer_s": transfer_s,
            "prefill_s": prefill_s,
            "ttft_s": wait_s + transfer_s + prefill_s,
        }

    def rows(self, most: int) -> list[Row]:
        """The `most` prefill nodes with the least TTFT, best first; those that cannot come last."""
        order = np.argsort(self.ttft_s, kind="stable")
        return [self.row(i) for i in order.tolist() if self.view.prefills[i]][:most]


def prefill_costs(
    now: float, demand: Demand, view: View, matched: Vector, threshold: float, fetch: bool = True
) -> PrefillCosts:
    """`matched` [N]: leading tokens of the prompt that each node has, in whole blocks. `fetch`: the pool counts."""
    n, pooled = float(demand.num_tokens), float(demand.pooled_tokens)
    wait_s = view.work_until - now
    np.maximum(wait_s, 0.0, out=wait_s)
    whole = view.prefill @ np.array((1.0, n, n * n))
    if matched is view.none:
        local, own_s = matched, whole
    else:
        local = np.minimum(matched, float(demand.usable_tokens))
        own_s = whole - local * (view.per_token + view.per_pair * local)
    fetched = transfer_s = rest_s = None
    least = own_s
    if fetch and pooled > 0:
        latency_s, per_byte_s = view.fetch
        transfer_s = latency_s + (pooled - local) * (per_byte_s * demand.token_bytes)
        rest_s = view.prefill @ np.array((1.0, n - pooled, n * n - pooled * pooled))
        remote_s = transfer_s + rest_s
        # a prefix is at least a block, so below one token means none: every threshold lets such a node fetch
        fetched = (remote_s < own_s) & (local < max(pooled / threshold, 1.0))
        least = np.where(fetched, remote_s, own_s)
    ttft_s = wait_s + least
    ttft_s += view.closed_prefill
    if (long := view.too_long(demand.num_tokens, demand.block_size)) is not None:
        ttft_s += long
    return PrefillCosts(view, demand, local, wait_s, ttft_s, own_s, fetched, transfer_s, rest_s)


@dataclass(slots=True)
class DecodeCosts:
    """Columns over the nodes of the view; `decode_s` is infinite where the node cannot decode this."""

    view: View
    demand: Demand
    wait_s: Vector
    handover_s: Vector
    decode_s: Vector  # time that the node adds after the first token
    headroom: Vector  # blocks it would have left

    def able(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.decode_s < np.inf).tolist()
        return found

    def roomy_s(self) -> Vector:
        """`decode_s`, infinite where the blocks do not suffice now."""
        return np.where(self.headroom >= 0, self.decode_s, np.inf)

    def row(self, i: int) -> Row:
        handover_s, step_s = float(self.handover_s[i]), float(self.view.step_s[i])
        return {
            "stage": "decode",
            "node": self.view.ids[i],
            "skipped": self.view.obstacle(i, self.demand.num_tokens, self.demand.block_size),
            "waiting": int(self.view.waiting[i]),
            "wait_s": float(self.wait_s[i]),
            "running": int(self.view.running[i]),
            "headroom_blocks": int(self.headroom[i]),
            "handover_s": handover_s,
            "step_s": step_s,
            "decode_s": handover_s + self.demand.output_tokens * step_s,
        }

    def rows(self, most: int) -> list[Row]:
        order = np.argsort(self.decode_s, kind="stable")
        return [self.row(i) for i in order.tolist() if self.view.decodes[i]][:most]


def decode_costs(demand: Demand, view: View, prefill: PrefillCosts, source: int) -> DecodeCosts:
    """`source`: where the prompt is prefilled; that node itself needs no hand-over."""
    latency_s, per_byte_s = view.handover(view.ids[source])
    handover_s = latency_s + per_byte_s * float(demand.kv_bytes)
    handover_s[source] = 0.0
    decode_s = handover_s + view.step_s * float(demand.output_tokens)
    decode_s += view.closed_decode
    if (long := view.too_long(demand.num_tokens, demand.block_size)) is not None:
        decode_s += long
    return DecodeCosts(view, demand, prefill.wait_s, handover_s, decode_s, view.free_blocks - float(demand.num_blocks))


def least(column: Vector, among: Sequence[int] | None = None) -> list[int]:
    """Indices of the least values; empty when all are infinite."""
    if among is not None:
        value = min((float(column[i]) for i in among), default=np.inf)
        return [i for i in among if column[i] <= value < np.inf]
    value = float(column.min(initial=np.inf))
    found: list[int] = np.flatnonzero(column <= value).tolist() if value < np.inf else []
    return found

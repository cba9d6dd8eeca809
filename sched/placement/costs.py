"""Algorithm 1's estimates for every node of a view at once.

    TTFT    = queue + prefix transfer + prefill of the rest
    prefill = a0 + a1 (n - p) + a2 (n^2 - p^2)       n tokens, p of them known; (n - p)(n - p + 2 p) = n^2 - p^2

If the pooled store holds a prefix more than `threshold` times as long as the node's own, the node may fetch the
difference instead of computing it; the cheaper of both counts (papers.md section 3, step 3). In the paper the pool is
the DRAM of the prefill nodes and the longest match names one of them; here it is the pooled store, or the arena of the
node that has most of the prompt. Blocks on SSD must first be read into the DRAM of their homes, which takes equally
long for all nodes. A node that computes the part from the first of them on before it is there fetches only the part in
front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import Flags, View

Row = dict[str, Any]
"""One candidate at one stage, JSON-ready: stage, node, its estimates, and `skipped` with the reason if it cannot."""


@dataclass(slots=True)
class PrefillCosts:
    """Columns over the nodes of the view. `ttft_s` is infinite for a node that cannot prefill this prompt."""

    now: float
    view: View
    demand: Demand
    local: Vector  # leading tokens cached on the node itself
    ttft_s: Vector
    work_s: Vector  # ttft_s without the queue
    own_s: Vector  # prefill after the node's own prefix
    transfer_s: Vector | None  # fetch of the pool's prefix; None: the pool has none
    rest_s: Vector | None  # prefill after the fetched prefix
    reach: Vector | float  # tokens of the prompt that it has after a fetch
    most_local: Vector | float  # a node with a prefix of at least this many tokens does not fetch

    @property
    def wait_s(self) -> Vector:
        return np.maximum(self.view.work_until - self.now, 0.0)

    def able(self) -> list[int]:
        return _places(self.ttft_s < np.inf)

    def row(self, i: int) -> Row:
        """The estimates of node `i`."""
        own, pooled = int(self.local[i]), self.demand.pooled_tokens
        transfer_s, prefill_s, prefix, source = 0.0, float(self.own_s[i]), own, "local" if own else "none"
        if self.transfer_s is not None and self.rest_s is not None and own < _one(self.most_local, i):
            fetch_s, rest_s = float(self.transfer_s[i]), float(self.rest_s[i])
            if fetch_s + rest_s < prefill_s:
                prefix, source = int(_one(self.reach, i)), self.demand.fetch_from
                transfer_s, prefill_s = fetch_s, rest_s
        wait_s = max(0.0, float(self.view.work_until[i]) - self.now)
        return {
            "stage": "prefill",
            "node": self.view.ids[i],
            "skipped": self.view.obstacle(i, self.demand.num_tokens, self.demand.block_size),
            "waiting": int(self.view.waiting[i]),
            "wait_s": wait_s,
            "local_tokens": own,
            "pool_tokens": pooled,
            "ssd_tokens": min(self.demand.ssd_tokens, pooled),
            "prefix_source": source,
            "prefix_tokens": prefix,
            "transfer_s": transfer_s,
            "prefill_s": prefill_s,
            "ttft_s": wait_s + transfer_s + prefill_s,
            "toll_s": float(self.work_s[i] * self.view.prompt_tolls()[i]),
        }

    def rows(self, most: int) -> list[Row]:
        """The `most` prefill nodes with the least TTFT, best first; unable nodes come last."""
        order = np.argsort(self.ttft_s, kind="stable")
        return [self.row(i) for i in order.tolist() if self.view.prefills[i]][:most]


def prefill_costs(
    now: float, demand: Demand, view: View, matched: Vector, threshold: float, fetch: bool = True
) -> PrefillCosts:
    """`matched` [N]: leading tokens of the prompt that each node holds, in whole blocks and at most
    demand.usable_tokens. `fetch`: whether nodes may fetch from the pool."""
    n, pooled = float(demand.num_tokens), float(demand.pooled_tokens)
    transfer_s = rest_s = None
    reach: Vector | float = pooled
    most_local: Vector | float = most_local_of(pooled, threshold)
    if fetch and pooled > 0:
        features = np.array(((1.0, n, n * n), (1.0, n - pooled, n * n - pooled * pooled)))
        whole, rest_s = features @ view.prefill
    else:
        whole = np.array((1.0, n, n * n)) @ view.prefill
    own_s = whole
    if matched is not view.none:
        own_s = view.a2 * matched
        own_s += view.a1
        own_s *= matched
        np.subtract(whole, own_s, out=own_s)
    ttft_s = view.open_at - now
    np.maximum(ttft_s, 0.0, out=ttft_s)
    work_s = own_s
    if rest_s is not None:
        latency_s, per_token_s = view.fetch(demand.fetch_token_bytes)
        if demand.ssd_s:
            near = float(demand.near_tokens)
            known = np.maximum(matched, near)
            reads = (view.a1 + view.a2 * (pooled + known) - per_token_s) * (pooled - known) > demand.ssd_s
            reach = np.where(reads, pooled, near)
            most_local = np.where(reads, most_local, most_local_of(near, threshold))
            rest_s = view.a0 + view.a1 * (n - reach) + view.a2 * (n * n - reach * reach)
        transfer_s = (reach - matched) * per_token_s
        transfer_s += latency_s
        if demand.ssd_s:
            transfer_s += np.where(reads, demand.ssd_s, 0.0)
        remote_s = transfer_s + rest_s
        work_s = np.where(matched < most_local, np.minimum(remote_s, own_s), own_s)
    ttft_s += work_s
    if (long := view.too_long(demand.num_tokens, demand.block_size)) is not None:
        ttft_s += long
    return PrefillCosts(now, view, demand, matched, ttft_s, work_s, own_s, transfer_s, rest_s, reach, most_local)


def most_local_of(pooled: float, threshold: float) -> float:
    """A node that has at least this many tokens does not fetch a prefix of `pooled` tokens. A prefix has at least one
    block, so less than one token means no prefix: such a node may always fetch."""
    return max(pooled / threshold, 1.0) if pooled else 0.0


def _one(column: Vector | float, i: int) -> float:
    """The value of node `i` in a column, or that of all nodes."""
    return column if isinstance(column, float) else float(column[i])


def least_prefill_s(view: View, tokens: int, context: int) -> float:
    """Least seconds over all nodes to compute `tokens` after `context`, without a step's fixed time; 0 = no prefill
    node."""
    each = view.a1 * tokens + view.a2 * (tokens * (tokens + 2 * context))
    return float(each[view.prefills].min()) if view.prefills.any() else 0.0


def horizon_s(now: float, demand: Demand, view: View) -> float:
    """Seconds until the prompt would reach its decode node: after its prefill on the node with the shortest queue."""
    if not len(view):
        return 0.0
    i = int(view.open_at.argmin())
    wait_s, n = max(0.0, float(view.open_at[i]) - now), float(demand.num_tokens)
    return wait_s + float(view.a0[i] + view.a1[i] * n + view.a2[i] * n * n) if wait_s < np.inf else 0.0


@dataclass(slots=True)
class DecodeCosts:
    """Columns over the nodes of the view. `decode_s` is infinite for a node that cannot decode this request."""

    view: View
    demand: Demand
    now: float
    handover_s: Vector
    token_s: Vector  # time per token when the prompt arrives there, including work promised to the node
    decode_s: Vector  # time that the node adds after the first token
    headroom: Vector  # blocks that it would have left

    def able(self) -> list[int]:
        return _places(self.decode_s < np.inf)

    def roomy_s(self) -> Vector:
        """`decode_s`, but infinite for nodes without enough free blocks now."""
        return np.where(self.headroom >= 0, self.decode_s, np.inf)

    def row(self, i: int) -> Row:
        handover_s, token_s = float(self.handover_s[i]), float(self.token_s[i])
        return {
            "stage": "decode",
            "node": self.view.ids[i],
            "skipped": self.view.obstacle(i, self.demand.num_tokens, self.demand.block_size),
            "waiting": int(self.view.waiting[i]),
            "wait_s": max(0.0, float(self.view.work_until[i]) - self.now),
            "running": int(self.view.running[i]),
            "headroom_blocks": int(self.headroom[i]),
            "handover_s": handover_s,
            "step_s": float(self.view.step_s[i]),
            "token_s": token_s,
            "decode_s": handover_s + (output_s := self.demand.output_tokens * token_s),
            "toll_s": float(self.view.queue_tolls_s()[i] + output_s * self.view.first_tolls()[i]),
        }

    def rows(self, most: int) -> list[Row]:
        order = np.argsort(self.decode_s, kind="stable")
        return [self.row(i) for i in order.tolist() if self.view.decodes[i]][:most]


def decode_costs(demand: Demand, view: View, prefill: PrefillCosts, source: int) -> DecodeCosts:
    """`source`: the prefill node; on that node itself decoding needs no hand-over. The estimate uses the step time that
    a node will have when the prompt arrives. With the present step time, all prompts of a busy minute would choose the
    node that is emptiest now."""
    latency_s, per_byte_s = view.handover(view.ids[source])
    handover_s = latency_s + per_byte_s * demand.handover_bytes
    handover_s[source] = 0.0
    token_s = np.maximum(view.step_s, view.step_soon_s)
    decode_s = handover_s + token_s * float(demand.output_tokens)
    decode_s += view.closed_decode
    if (long := view.too_long(demand.num_tokens, demand.block_size)) is not None:
        decode_s += long
    headroom = view.free_blocks - float(demand.num_blocks)
    return DecodeCosts(view, demand, prefill.now, handover_s, token_s, decode_s, headroom)


def least(column: Vector, among: Sequence[int] | None = None) -> list[int]:
    """Indices of the smallest values; empty when all are infinite."""
    if among is not None:
        value = min((float(column[i]) for i in among), default=np.inf)
        return [i for i in among if column[i] <= value < np.inf]
    value = column.item(int(column.argmin())) if len(column) else np.inf
    return _places(column <= value) if value < np.inf else []


def _places(flags: Flags) -> list[int]:
    """Indices of true flags; takes half the time of np.flatnonzero."""
    found: list[int] = flags.nonzero()[0].tolist()
    return found

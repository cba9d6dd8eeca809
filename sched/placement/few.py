"""Algorithm 1 over a few nodes, in plain floats. A numpy call costs as much as one node costs here, and costs.py makes
forty such calls. The estimates and the choice equal those of costs.py and central.py; tests compare them. `explain`
computes the columns on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from sched.admission import Limits, retry_after_s
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import DecodeCosts, PrefillCosts, Row, decode_costs, prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Line, Lines, Vector, columns
from sched.placement.record_table import Table
from sched.placement.view import View

MAX_FEW_NODES = 48
"""Up to this many nodes, plain floats are faster than columns."""

Rows = list[list[float]]
"""A view's table: a list for each of COLUMNS with an entry for each node."""


@dataclass(slots=True)
class FewCosts:
    """A copy of the inputs of both stages, because the view and the links may change after the decision. Timelines keep
    it, and the garbage collector visits every list: so the table is one array."""

    now: float
    demand: Demand
    view: View
    matched: Vector
    threshold: float
    fetches: bool
    table: Table
    fetched: list[Line]  # from the pool into each node; empty: the pool has nothing
    source: int
    handed_over: list[Line]  # from `source` to each node

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return columns(self.fetched)

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handed_over)

    def fetch_each(self, nodes: Sequence[str]) -> list[Line]:
        return self.fetched

    def handover_each(self, source: str, nodes: Sequence[str]) -> list[Line]:
        return self.handed_over

    def stages(self) -> tuple[PrefillCosts, DecodeCosts]:
        """The same estimates in columns."""
        view = self.view.at(self.table, self)
        prefill = prefill_costs(self.now, self.demand, view, self.matched, self.threshold, self.fetches)
        return prefill, decode_costs(self.demand, view, prefill, self.source)

    def rows(self, most: int) -> list[Row]:
        """The `most` best nodes of each stage."""
        return [row for stage in self.stages() for row in stage.rows(most)]


def place_few(
    now: float,
    demand: Demand,
    view: View,
    matched: Vector,
    threshold: float,
    fetches: bool,
    limits: Limits,
    drawn: Callable[[list[int]], int],
) -> Placement | Rejected | None:
    """Least TTFT, then least time to decode among the nodes with room. `drawn` chooses among equals. None: no node can
    prefill the request, or no node can decode it; `drawn` was not called."""
    table: Rows = view.table.tolist()
    local: list[float] = matched.tolist()
    a0, a1, a2, open_at, work_until, closed, waiting, _, _, free, total, step, soon, *_ = table
    tokens, block_size = demand.num_tokens, demand.block_size
    n, pooled = float(tokens), float(demand.pooled_tokens) if fetches else 0.0
    nn, left, left_squared = n * n, n - pooled, n * n - pooled * pooled
    most_local = max(pooled / threshold, 1.0) if pooled else 0.0
    token_bytes = demand.fetch_token_bytes
    fetched = view.fetch_each() if pooled else []

    best, able, decodable = inf, [], False
    for i, at in enumerate(open_at):
        if total[i] * block_size <= tokens:
            continue
        if not closed[i]:
            decodable = True
        if at == inf:
            continue
        own = local[i]
        ttft_s = a0[i] + a1[i] * n + a2[i] * nn
        if own:
            ttft_s -= (a2[i] * own + a1[i]) * own
        if own < most_local:
            latency_s, per_byte_s = fetched[i]
            fetch_s = (pooled - own) * (per_byte_s * token_bytes) + latency_s + demand.ssd_s
            fetch_s += a0[i] + a1[i] * left + a2[i] * left_squared
            if fetch_s < ttft_s:
                ttft_s = fetch_s
        if at > now:
            ttft_s += at - now
        if ttft_s < best:
            best, able = ttft_s, [i]
        elif ttft_s == best < inf:
            able.append(i)
    if not able or not decodable:
        return None
    source = able[0] if len(able) == 1 else drawn(able)

    ids = view.ids
    handed_over = view.handover_each(ids[source])
    kv_bytes, output, need = demand.handover_bytes, float(demand.output_tokens), demand.num_blocks
    best, able, roomiest, room = inf, [], 0, -inf
    for i, shut in enumerate(closed):
        if shut or total[i] * block_size <= tokens:
            continue
        headroom = free[i] - need
        if headroom >= 0:
            latency_s, per_byte_s = handed_over[i]
            decode_s = (latency_s + per_byte_s * kv_bytes) if i != source else 0.0
            decode_s += (step[i] if step[i] > soon[i] else soon[i]) * output
            if decode_s < best:
                best, able = decode_s, [i]
            elif decode_s == best:
                able.append(i)
        elif headroom > room:
            roomiest, room = i, headroom
    target = roomiest if not able else able[0] if len(able) == 1 else drawn(able)

    costs = FewCosts(now, demand, view, matched, threshold, fetches, view.table.copy(), fetched, source, handed_over)
    own = local[source]
    prefill_s, prefix, kind = a0[source] + a1[source] * n + a2[source] * nn, int(own), "local" if own else "none"
    prefill_s -= (a2[source] * own + a1[source]) * own
    transfer_s = 0.0
    if own < most_local:
        latency_s, per_byte_s = fetched[source]
        fetch_s = (pooled - own) * (per_byte_s * token_bytes) + latency_s + demand.ssd_s
        rest_s = a0[source] + a1[source] * left + a2[source] * left_squared
        if fetch_s + rest_s < prefill_s:
            transfer_s, prefill_s, prefix, kind = fetch_s, rest_s, int(pooled), demand.fetch_from
    wait_s = max(0.0, work_until[source] - now)
    ttft_s = wait_s + transfer_s + prefill_s
    latency_s, per_byte_s = handed_over[target]
    miss = limits.missed(ttft_s, step[target])
    if miss is not None:
        return Rejected(miss, retry_after_s([(int(waiting[source]), wait_s)]), stages=(costs,))
    return Placement(
        prefill=ids[source],
        decode=ids[target],
        prefix_source=kind,
        prefix_tokens=prefix,
        estimates={
            "wait_s": wait_s,
            "transfer_s": transfer_s,
            "prefill_s": prefill_s,
            "ttft_s": ttft_s,
            "handover_s": latency_s + per_byte_s * kv_bytes if target != source else 0.0,
            "step_s": step[target],
        },
        stages=(costs,),
    )

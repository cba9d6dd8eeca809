"""Algorithm 1 over a few nodes, in plain floats. A numpy call costs as much as one node costs here, and costs.py makes
forty such calls. The estimates and the choice equal those of costs.py and central.py; tests compare them. `explain`
computes the columns on demand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from sched.admission import Limits, retry_after_s
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import DecodeCosts, PrefillCosts, Row, decode_costs, most_local_of, prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Lines, Paths, Place, Vector, columns
from sched.placement.record_table import COLUMNS
from sched.placement.view import PROMPT_TOLL_MOST, TOLL_OF_FIRST, TOLL_OF_PROMPT, TOLL_OF_QUEUE, View

MAX_FEW_NODES = 48
"""Up to this many nodes, plain floats are faster than columns."""

NO_PATHS = array("d")
_STEP = COLUMNS.index("step_s")


Found = tuple[int, int, Paths, float, float, float, float, float, float, float, float]
"""The choice and its estimates: prefill node and decode node (indices of the view), the paths from the prefill node to
each node, prefix_tokens (tokens not computed), whether they are fetched (1.0 or 0.0), requests waiting on the prefill
node, wait_s, transfer_s, prefill_s, handover_s, step_s."""

Drawn = Callable[[list[int]], int]
Finder = Callable[[float, Demand, View, bytes, Vector, float, Paths, Drawn], Found | None]
"""(now, demand, view, table, matched, threshold, fetched, drawn). `table`: the bytes of the view's table; `fetched`:
paths from the pool into each node, empty if nothing can be fetched. None: no node can prefill the request, or no node
can decode it; `drawn` was not called."""


@dataclass(slots=True)
class FewCosts:
    """A copy of the inputs of both stages, because the view and the links may change after the decision. Timelines keep
    it, and the garbage collector visits every list: so the table is bytes."""

    now: float
    demand: Demand
    view: View
    matched: Vector
    threshold: float
    fetches: bool
    table: bytes
    fetched: Paths  # from the pool into each node; empty: the pool has nothing
    source: int
    handed_over: Paths  # from `source` to each node

    @property
    def places(self) -> Mapping[str, Place]:
        """A decision that is made needs none."""
        return {}

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return columns(self.fetched)

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handed_over)

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return self.fetched

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return self.handed_over

    def stages(self) -> tuple[PrefillCosts, DecodeCosts]:
        """The same estimates in columns."""
        view = self.view.at(np.frombuffer(self.table).reshape(len(COLUMNS), -1), self)
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
    drawn: Drawn,
    find: Finder | None = None,
) -> Placement | Rejected | None:
    """Least TTFT, then least time to decode among the nodes with room. `drawn` chooses among equals. `find`: a faster
    `find_few`. None: no node can prefill the request, or no node can decode it; `drawn` was not called."""
    fetched = view.fetch_each() if fetches and demand.pool_tokens else NO_PATHS
    table = view.table.tobytes()
    found = (find or find_few)(now, demand, view, table, matched, threshold, fetched, drawn)
    if found is None:
        return None
    source, target, handed_over, prefix, fetching, waiting, wait_s, transfer_s, prefill_s, handover_s, step_s = found
    costs = FewCosts(now, demand, view, matched, threshold, fetches, table, fetched, source, handed_over)
    ttft_s = wait_s + transfer_s + prefill_s
    miss = limits.missed(ttft_s, step_s)
    if miss is not None:
        return Rejected(miss, retry_after_s([(int(waiting), wait_s)]), stages=(costs,))
    return Placement(
        view.ids[source],
        view.ids[target],
        demand.fetch_from if fetching else "local" if prefix else "none",
        int(prefix),
        {
            "wait_s": wait_s,
            "transfer_s": transfer_s,
            "prefill_s": prefill_s,
            "ttft_s": ttft_s,
            "handover_s": handover_s,
            "step_s": step_s,
        },
        (costs,),
    )


def find_few(
    now: float,
    demand: Demand,
    view: View,
    table: bytes,
    matched: Vector,
    threshold: float,
    fetched: Paths,
    drawn: Drawn,
) -> Found | None:
    """See Finder. A node whose queue alone takes longer than the best estimate so far is passed over."""
    tokens, block_size = demand.num_tokens, demand.block_size
    token_bytes, ssd_s = demand.fetch_token_bytes, demand.ssd_s
    n, pooled = float(tokens), float(demand.pooled_tokens) if fetched else 0.0
    near = float(demand.near_tokens) if ssd_s else pooled
    most_local, most_near = most_local_of(pooled, threshold), most_local_of(near, threshold)
    nn, left, left_squared = n * n, n - pooled, n * n - pooled * pooled
    nodes: list[list[float]] = view.table.T.tolist()
    local: list[float] = matched.tolist()

    best, able = inf, []
    decoders: list[tuple[int, float, float, float, float]] = []  # (node, free blocks, seconds per token, tolls)
    for i, (a0, a1, a2, at, _, shut, _, running, queued, free, total, step, soon, _, _, _, tolled) in enumerate(nodes):
        if total * block_size <= tokens:
            continue
        if not shut:
            first = TOLL_OF_FIRST * tolled if running == 0.0 else 0.0
            decoders.append((i, free, step if step > soon else soon, TOLL_OF_QUEUE * (a1 * queued) * tolled, first))
        wait_s = at - now
        if wait_s > best:
            continue
        own = local[i]
        ttft_s = a0 + a1 * n + a2 * nn
        if own:
            ttft_s -= (a2 * own + a1) * own
        if own < most_local:
            token_s = fetched[2 * i + 1] * token_bytes
            if not ssd_s or _reads(a1, a2, token_s, own, near, pooled, ssd_s):
                fetch_s = (pooled - own) * token_s + fetched[2 * i] + ssd_s
                fetch_s += a0 + a1 * left + a2 * left_squared
            elif own < most_near:
                fetch_s = (near - own) * token_s + fetched[2 * i]
                fetch_s += a0 + a1 * (n - near) + a2 * (nn - near * near)
            else:
                fetch_s = inf
            if fetch_s < ttft_s:
                ttft_s = fetch_s
        toll_s = ttft_s * (min(TOLL_OF_PROMPT * running, PROMPT_TOLL_MOST) * tolled)
        if wait_s > 0.0:
            ttft_s += wait_s
        ttft_s += toll_s
        if ttft_s < best:
            best, able = ttft_s, [i]
        elif ttft_s == best < inf:
            able.append(i)
    if not able or not decoders:
        return None
    source = able[0] if len(able) == 1 else drawn(able)

    handed_over = view.handover_each(view.ids[source])
    kv_bytes, output, need = demand.handover_bytes, float(demand.output_tokens), demand.num_blocks
    best, able, roomiest, room = inf, [], 0, -inf
    for i, free, token_s, queue_s, first in decoders:
        if free >= need:
            decode_s = output_s = token_s * output
            if decode_s > best:
                continue
            if i != source:
                decode_s += handed_over[2 * i] + handed_over[2 * i + 1] * kv_bytes
            decode_s += queue_s
            decode_s += output_s * first
            if decode_s < best:
                best, able = decode_s, [i]
            elif decode_s == best:
                able.append(i)
        elif free > room:
            roomiest, room = i, free
    target = roomiest if not able else able[0] if len(able) == 1 else drawn(able)

    a0, a1, a2, _, until, _, waiting, *_ = nodes[source]
    prefix, fetching, transfer_s = local[source], 0.0, 0.0
    prefill_s = a0 + a1 * n + a2 * nn - (a2 * prefix + a1) * prefix
    if prefix < most_local:
        token_s, reach, most = fetched[2 * source + 1] * token_bytes, pooled, most_local
        if ssd_s and not _reads(a1, a2, token_s, prefix, near, pooled, ssd_s):
            reach, most, ssd_s = near, most_near, 0.0
        fetch_s = (reach - prefix) * token_s + fetched[2 * source] + ssd_s
        rest_s = a0 + a1 * (n - reach) + a2 * (nn - reach * reach)
        if prefix < most and fetch_s + rest_s < prefill_s:
            prefix, fetching, transfer_s, prefill_s = reach, 1.0, fetch_s, rest_s
    handover_s = handed_over[2 * target] + handed_over[2 * target + 1] * kv_bytes if target != source else 0.0
    wait_s, step_s = max(0.0, until - now), nodes[target][_STEP]
    return source, target, handed_over, prefix, fetching, waiting, wait_s, transfer_s, prefill_s, handover_s, step_s


def _reads(a1: float, a2: float, token_s: float, own: float, near: float, pooled: float, ssd_s: float) -> bool:
    """Whether a node that has the first `own` tokens gets the part of the prefix behind its `near` tokens sooner from
    SSD than by computing it."""
    known = own if own > near else near
    return (a1 + a2 * (pooled + known) - token_s) * (pooled - known) > ssd_s

"""Estimates from gossiped load how many nodes of one role meet the objectives. Pure.

    prefill    offered = mean busy nodes + growth of the queued work per second + late work over LATE_WINDOWS windows
               the fewest nodes k > offered with P(wait > TTFT objective - service) <= 1 - SHARE   (sched/waiting.py)
    decode     n requests present, B of them per node:  the fewest k >= (n + z sqrt(n)) / B
               B = the least of the seats, the requests whose KV fits, and those whose step meets the TBT objective
    both       as for prefill, with n / B further busy nodes, and at least as many as for decode
    store      the fewest nodes whose network is at most NIC_BUSY in use

The same formulas plan a cluster (reference/scheduling.md section 9, 1 and 2); here each term is measured. Work that
arrives per second is what is done per second plus what is queued more, so `offered` needs no knowledge of requests. The
residual service time follows from the work on a busy node, which is residual_s / (1 - busy) in M/G/1.

Load counts on every node, also on one that drains; capacity only on nodes that stay. A node that reads replaced weights
stays: it takes no requests for a moment, and a node that starts instead would come too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sched.classes import ServiceClass
from sched.role_change import Seen
from sched.waiting import waiting

SHARE = 0.95
"""Share of the requests that should meet the objectives."""
Z = 1.645
"""The quantile of the normal distribution at SHARE."""

IDLE_S = 1e-3
"""A node with less work is not busy: sums of estimates leave a rest."""

NIC_BUSY = 0.7
MAX_BUSY = 0.9
"""Above this load the formula of the residual time does not hold."""

SLOW_WINDOWS = 20
"""Windows over which the properties of nodes and requests are averaged: they change more slowly than the load."""

LATE_WINDOWS = 6
"""Windows in which work that is late already should be done. A node that starts takes longer than one window."""

LEAST_LEFT = 0.25
"""Share of the TTFT objective that a prompt may wait, however long its own prefill takes. No number of nodes shortens
that, so it must not demand any."""

MOST_NODES = 100_000

MARGIN = 0.25
"""A node leaves only if the others could bear this much more than the present load."""

IN_WINDOWS = 4
"""The load is averaged over in_s / IN_WINDOWS, and also over out_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad(Seen):
    """One node, from its membership and its record."""

    role: str  # sched/scaling/bounds.py
    ready: bool  # it has loaded its model
    draining: bool = False
    running: int = 0
    waiting: int = 0
    step_s: float = 0.0  # decode step with one more request; 0 = not known
    nic: float = 0.0  # share of its network in use
    cost: float = 1.0  # per hour

    @property
    def takes(self) -> bool:
        """Whether it counts as capacity."""
        return self.ready and not self.draining


class Smoothed:
    """A mean that forgets: a value counts 1/e after `window_s`."""

    def __init__(self, window_s: float) -> None:
        self.mean = 0.0
        self._window_s, self._at = window_s, math.nan

    def add(self, now: float, value: float) -> None:
        kept = 0.0 if math.isnan(self._at) else math.exp((self._at - now) / self._window_s)
        self.mean, self._at = kept * self.mean + (1 - kept) * value, now


class StepLine:
    """Seconds of a decode step as a line over its requests, fitted to the forecasts of all nodes."""

    def __init__(self, window_s: float) -> None:
        self._x, self._y, self._xx, self._xy = (Smoothed(window_s) for _ in range(4))

    def add(self, now: float, nodes: Sequence[NodeLoad]) -> None:
        points = [(node.running + 1.0, node.step_s) for node in nodes if node.step_s > 0]
        for mean, values in (
            (self._x, [x for x, _ in points]),
            (self._y, [y for _, y in points]),
            (self._xx, [x * x for x, _ in points]),
            (self._xy, [x * y for x, y in points]),
        ):
            if points:
                mean.add(now, sum(values) / len(points))

    def most(self, tbt_s: float) -> float:
        """Requests of a step that meets the objective. Infinite if none is known, or if not even one request meets it:
        then more nodes do not help."""
        x, y = self._x.mean, self._y.mean
        spread = self._xx.mean - x * x
        slope = (self._xy.mean - x * y) / spread if spread > 0.25 else 0.0
        if slope > 0:
            found = x + (tbt_s - y) / slope
            return found if found >= 1 else math.inf
        return max(1.0, x * tbt_s / y) if y > tbt_s and x > 1.5 else math.inf


class Need:
    """The load of one role over about `window_s` seconds, and the nodes that it needs."""

    def __init__(self, window_s: float) -> None:
        slow_s = SLOW_WINDOWS * window_s
        self._busy, self._work_s, self._requests, self._nic = (Smoothed(window_s) for _ in range(4))
        self._residual_s, self._request_blocks = Smoothed(slow_s), Smoothed(slow_s)
        self._steps = StepLine(slow_s)
        self._window_s = window_s
        self._work_now_s = 0.0
        self._takers: list[NodeLoad] = []
        self._prefills = self._decodes = False

    def observe(self, now: float, nodes: Sequence[NodeLoad]) -> None:
        """All nodes of the role. Call it at even intervals that are shorter than the window."""
        self._takers = [node for node in nodes if node.takes]
        self._prefills = any("prefill" in node.can for node in nodes)
        self._decodes = any("decode" in node.can for node in nodes)
        work = [node.work_s for node in nodes if node.work_s > IDLE_S and "prefill" in node.can]
        self._work_now_s = sum(work)
        self._busy.add(now, len(work))
        self._work_s.add(now, self._work_now_s)
        if work:
            busy = min(MAX_BUSY, self._busy.mean / max(1, len(self._takers)))
            self._residual_s.add(now, self._work_now_s / len(work) * (1 - busy))
        decoding = [node for node in nodes if "decode" in node.can]
        self._requests.add(now, sum(node.running + node.waiting for node in decoding))
        if (soon := sum(node.running_soon for node in decoding)) > 0:
            self._request_blocks.add(now, sum(node.blocks_soon for node in decoding) / soon)
        self._steps.add(now, decoding)
        self._nic.add(now, sum(node.nic for node in nodes))

    def nodes(self, objective: ServiceClass, factor: float = 1.0) -> int:
        """The fewest nodes for `factor` times the load; at least 1. Never fewer for a greater factor."""
        if not (self._prefills or self._decodes):
            return max(1, math.ceil(factor * self._nic.mean / NIC_BUSY))
        requests, per_node = factor * self._requests.mean, self._requests_per_node(objective)
        decode = math.ceil((requests + Z * math.sqrt(requests)) / per_node)
        if not self._prefills:
            return max(1, decode)
        offered = factor * self._offered(objective) + (requests / per_node if self._decodes else 0.0)
        return max(1, decode, self._prefill_nodes(offered, objective))

    def presses(self, objective: ServiceClass) -> bool:
        """Whether the nodes are too few for the load of these seconds, and not only for one that fluctuates about it:
        prompts are late, or soon will be; or requests have no seat; or the network is full."""
        takers = len(self._takers)
        if not (self._prefills or self._decodes):
            return self._nic.mean > NIC_BUSY * takers
        soon_s = self._work_now_s + max(0.0, self._growth) * LATE_WINDOWS * self._window_s
        late = self._prefills and soon_s > takers * self._left_s(objective)
        return late or (self._decodes and self._requests.mean > takers * self._requests_per_node(objective))

    @property
    def _growth(self) -> float:
        """Seconds of queued work per second."""
        return (self._work_now_s - self._work_s.mean) / self._window_s

    def _offered(self, objective: ServiceClass) -> float:
        """Busy nodes that the arriving work needs, and those that finish late work in addition."""
        late_s = self._work_now_s - len(self._takers) * self._left_s(objective)
        return max(0.0, self._busy.mean + self._growth) + max(0.0, late_s) / (LATE_WINDOWS * self._window_s)

    def _left_s(self, objective: ServiceClass) -> float:
        return max(objective.ttft_s - self._residual_s.mean, LEAST_LEFT * objective.ttft_s)

    def _prefill_nodes(self, offered: float, objective: ServiceClass) -> int:
        nodes, left_s = math.floor(offered) + 1, self._left_s(objective)
        residual_s = max(self._residual_s.mean, 1e-6)
        while nodes < MOST_NODES:
            share, mean_s = waiting(nodes, offered, residual_s)
            if share * math.exp(-left_s / mean_s) <= 1 - SHARE:
                break
            nodes += 1
        return nodes

    def _requests_per_node(self, objective: ServiceClass) -> float:
        takers = [node for node in self._takers if node.max_running]
        if not takers:
            return 1.0
        seats = sum(node.max_running for node in takers) / len(takers)
        blocks = sum(node.blocks_total for node in takers) / len(takers)
        fits = blocks / self._request_blocks.mean if blocks and self._request_blocks.mean > 0 else math.inf
        return max(1.0, min(seats, fits, self._steps.most(objective.tbt_s)))


class Demand:
    """The need for the load of a longer time, and also for that of the present one if it is more than the nodes can do:
    a short window alone would follow every fluctuation. Times as in sched/scaling/crew.py."""

    def __init__(self, out_s: float, in_s: float) -> None:
        self._soon, self._long = Need(out_s), Need(max(out_s, in_s / IN_WINDOWS))

    def observe(self, now: float, nodes: Sequence[NodeLoad]) -> None:
        """See Need.observe."""
        self._soon.observe(now, nodes)
        self._long.observe(now, nodes)

    def nodes(self, objective: ServiceClass) -> tuple[int, int]:
        """(nodes for the load, nodes for MARGIN more)."""
        soon = self._soon.nodes(objective) if self._soon.presses(objective) else 1
        need = max(soon, self._long.nodes(objective))
        return need, max(need, self._long.nodes(objective, 1 + MARGIN))

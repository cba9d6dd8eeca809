"""The alternatives to Algorithm 1: baselines of the paper and of other systems, each in a few lines.

random          any able node: the floor that every policy must beat
round-robin     the nodes in turn
least-load      the shortest queue, without regard to the cache (load balancing, papers.md section 7)
local-cache     Algorithm 1 without KV transfers between prefill nodes (local cache-aware)
power-of-two    the better of two random nodes, both asked: robust against old gossip
dynamo-cost     NVIDIA Dynamo's router: a weighted sum of blocks to prefill and blocks being decoded
llm-d           llm-d's weighted scorers: prefix 2, queue 1, free KV memory 1
preble          Preble's E2: to the longest prefix if it covers most of the prompt, else to the least work
banaserve       BanaServe's routing: the least load, because every prefix is in the pool
netkv           NetKV: the decode node to which the KV moves in the least time, by distance and load of the links
gorgo           GORGO v2: tokens to compute plus weighted tokens that wait; the weight follows the measured TTFT

Those that place both phases on the same nodes are in phases.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.central import CentralGreedy
from sched.placement.costs import DecodeCosts, PrefillCosts, least
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.two_stages import TwoStages
from sched.placement.view import View


class RandomPlacement(TwoStages):
    """Chooses a random able node."""

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.rng.choice(able)

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.rng.choice(able)


class RoundRobin(TwoStages):
    """Chooses nodes in turn; each acceptor has its own counter."""

    prefills = decodes = 0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        self.prefills += 1
        return able[self.prefills % len(able)]

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        self.decodes += 1
        return able[self.decodes % len(able)]


class LeastLoad(TwoStages):
    """The least queued prefill work; the fewest running requests."""

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(costs.wait_s, able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.running, able))


class LocalCache(CentralGreedy):
    """Algorithm 1 without the fetch of step 3: the least queue plus prefill after the node's own prefix."""

    fetches = False


class PowerOfTwo(TwoStages):
    """Draws two nodes per stage and asks only these."""

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        pools = (np.flatnonzero(np.isfinite(column)).tolist() for column in (view.open_at, view.closed_decode))
        return list(dict.fromkeys(i for able in pools for i in self._two(able)))

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(costs.ttft_s, self._two(able)))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.decode_s, self._two(able)))

    def _two(self, able: list[int]) -> list[int]:
        return able if len(able) <= 2 else self.rng.sample(able, 2)


class DynamoCost(TwoStages):
    """prefill: queued + new blocks to compute, minus cached blocks; decode: blocks in use + blocks of the request.

    Dynamo weights a cached block by its tier (1 on the device). Records do not contain tiers, so every cached block
    counts 1 here. The decode node is chosen after the prefill node, as in Dynamo's disaggregated router."""

    asks_everybody = True
    fetches = False
    overlap_weight = 1.0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        blocks = costs.view.queued_tokens + costs.demand.num_tokens - self.overlap_weight * costs.local
        return self.drawn(least(np.maximum(blocks, 0.0), able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.total_blocks - costs.view.free_blocks, able))


class LlmdScorers(TwoStages):
    """llm-d's inference scheduler: the node with the highest sum of scores from 0 to 1, by its default weights.

        prefix   2   the share of the prompt that the node holds
        queue    1   1 at the shortest queue, 0 at the longest (in requests)
        memory   1   the free share of its KV blocks

    The decode node is scored by queue and memory. Equal sums are decided by chance, as there."""

    asks_everybody = True
    fetches = False
    prefix_weight, queue_weight, memory_weight = 2.0, 1.0, 1.0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        prefix = costs.local / max(1, costs.demand.num_tokens)
        return self.drawn(least(-self.prefix_weight * prefix - self._load(costs.view, able), able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(-self._load(costs.view, able), able))

    def _load(self, view: View, able: list[int]) -> Vector:
        queued = view.waiting + view.running
        shortest, longest = float(queued[able].min()), float(queued[able].max())
        queue = (longest - queued) / (longest - shortest) if longest > shortest else np.ones(len(queued))
        free = view.free_blocks / np.maximum(view.total_blocks, 1.0)
        load: Vector = self.queue_weight * queue + self.memory_weight * free
        return load


class Preble(TwoStages):
    """Preble's E2 (arXiv 2407.00023): exploit a prefix, or explore.

    If the longest cached prefix is longer than the rest of the prompt, the request goes to a node that has it (the one
    with the least work of these), unless that node's queue takes `imbalance` times as long as the least work of all.
    Otherwise it goes where queued work plus its own prefill is least. Preble also charges the prefixes that a node
    would evict; records do not name them, so this part is missing here."""

    asks_everybody = True
    fetches = False
    imbalance = 2.0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        work = costs.wait_s + costs.own_s
        longest = float(costs.local[able].max())
        if 2 * longest > costs.demand.num_tokens:
            holder = self.drawn(least(work, [i for i in able if costs.local[i] >= longest]))
            if costs.wait_s[holder] <= self.imbalance * float(work[able].min()):
                return holder
        return self.drawn(least(work, able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.running, able))


class BanaServe(LeastLoad):
    """BanaServe's router (arXiv 2510.13223, load-aware request scheduling): pure load, without regard to where a prefix
    is, because a global store has them all.

    Kept: a central view of the present load, and the store: a node fetches what the pool has more of than itself
    (--kvcache-balancing-threshold), if that is faster than computing it. The load of a decode node is its share of used
    KV memory plus its running requests over those of the busiest node. Left out: the migration of layers and of
    attention heads between nodes, because a node here has all layers of its model."""

    asks_everybody = True

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        view = costs.view
        used = 1.0 - view.free_blocks / np.maximum(view.total_blocks, 1.0)
        return self.drawn(least(used + view.running / max(1.0, float(view.running[able].max())), able))


class NetKV(CentralGreedy):
    """NetKV (arXiv 2606.03910): the decode node to which the KV moves fastest, over distance and load of the links,

        score = idle hand-over there / (1 - share of its network that receives) + decode step there

    The paper divides by what congestion leaves of the bandwidth in an operator's table. Nobody has that table here, and
    a hand-over that was measured over the path, or over paths as long as it (--network-place,
    sched/placement/measured_links.py), has the congestion of its time in it. So the idle hand-over is the measured one
    times what the load of the node usually leaves, its mean over the last placements; else congestion would count
    twice. The prefill node is Algorithm 1's: the paper chooses decode nodes only.

    Kept: a greedy choice over all decode nodes with room, tiers of distance, and a load that gossip reports. Left out:
    the load of the switches, which no node can see."""

    tolls = False
    busiest = 0.95
    remembered = 50
    """Placements over which the usual load is a mean: measured paths forget after dozens of transfers too."""

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5) -> None:
        super().__init__(limits, rng, threshold)
        self._usual: dict[str, float] = {}  # mean share that receives, by node

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        receiving = np.minimum(costs.view.nics[0], self.busiest)
        score = costs.handover_s * (1.0 - self._usually(costs.view.ids, receiving)) / (1.0 - receiving) + costs.token_s
        score[(costs.headroom < 0) | ~(costs.decode_s < np.inf)] = np.inf
        if best := least(score):
            return self.drawn(best)
        return super().choose_decode(costs, able)

    def _usually(self, nodes: Sequence[str], receiving: Vector) -> Vector:
        """The usual load of these nodes, with the present one in it."""
        usual = np.array([self._usual.get(node, 0.0) for node in nodes])
        usual += (receiving - usual) / self.remembered
        self._usual = dict(zip(nodes, usual.tolist(), strict=True))
        return usual


class Gorgo(TwoStages):
    """GORGO v2 (arXiv 2602.11688, June 2026, sections 2.2 and 2.3): the least sum of three costs,

        tokens of the prompt that the node does not hold + queue weight * tokens that wait there + RTT weight * RTT

    where a (1+1) evolution strategy tunes the weights to the 95th percentile of the measured TTFT: after every `window`
    requests it draws the logarithm of the weight again, around the best one so far, and keeps it if that percentile
    fell. The step size follows the 1/5 success rule.

    Kept: the cost, the fixed weight 1 of the prefill, and the tuning of the queue weight. Left out: the RTT, which is
    the same for all nodes of a site. One proxy sends all requests in the paper; here each acceptor tunes its own
    weight, as LearnedPlacement does. Decode nodes are not part of the paper: fewest running requests."""

    asks_everybody = True
    fetches = False
    window = 32
    range_of_weight = (0.01, 100.0)

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5) -> None:
        super().__init__(limits, rng, threshold)
        self.weight = self.best_weight = 1.0
        self.best_s = math.inf
        self.step = 0.5  # standard deviation of the logarithm
        self._seen_s: list[float] = []

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        score = costs.demand.num_tokens - costs.local + self.weight * costs.view.queued_tokens
        return self.drawn(least(score, able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.running, able))

    def observed(self, node: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """See LearningPolicy."""
        self._seen_s.append(ttft_s)
        if len(self._seen_s) < self.window:
            return
        tail_s = sorted(self._seen_s)[math.ceil(0.95 * self.window) - 1]
        self._seen_s.clear()
        if tail_s < self.best_s:
            self.best_weight, self.best_s = self.weight, tail_s
            self.step *= GROWS
        else:
            self.best_s *= FORGETS
            self.step *= SHRINKS
        low, high = self.range_of_weight
        self.weight = min(high, max(low, self.best_weight * math.exp(self.step * self._normal())))

    def _normal(self) -> float:
        """A draw from the standard normal distribution: the sum of twelve uniform ones, less its mean."""
        return sum(self.rng.random() for _ in range(12)) - 6.0


GROWS, SHRINKS = math.exp(0.8 / 3), math.exp(-0.2 / 3)
"""Factors of GORGO's step after a success and after a failure: they cancel out at one success in five."""

FORGETS = 1.02
"""Not in the paper, which tunes in one window of load: the best percentile fades by this factor, because a record of a
quiet hour must not stop the tuning of a busy one."""

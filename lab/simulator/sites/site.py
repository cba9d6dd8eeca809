"""One site: its cluster, with prefixes that come from other sites. Prices, budgets and copies by the classes of
production (sched/placement/sites/, cache/sites/), used as engine/sites/far_prefixes.py uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cache.sites.budget import LinkBudget
from cache.sites.copies import ExpiringCopies, SecondHit
from lab.simulator.cluster import Cluster, FarFetch
from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from lab.simulator.models.pool import Pool
from lab.simulator.models.step_models import StepModel
from lab.simulator.node import Node
from lab.simulator.sites.rules import SiteRules
from sched.cost import TransferModel
from sched.placement.sites.choice import SiteCost, far_saves_s, site_cost

EXPIRY_LOOKS = 4
"""Looks for copies whose TTL is over, during one TTL."""


class Site(Cluster):
    """`others`: the sites from which it may get KV; `between`: the links, a flow from the end NAME>NAME to itself."""

    def __init__(
        self,
        name: str,
        config: SimConfig,
        rules: SiteRules,
        loop: Loop,
        between: Network,
        model: StepModel | None = None,
    ) -> None:
        """Raises ValueError for a configuration whose pool knows no homes."""
        super().__init__(config, model, loop)
        if isinstance(self.pool, Pool) or config.ssd_blocks or self.model.kv is not None:
            raise ValueError("sites need --pool-model real, no SSD tier, and a model without windows and states")
        self._homed = self.pool
        self.name, self.rules, self.between = name, rules, between
        self.others: list[Site] = []
        self.far_bytes = 0.0  # that have come from other sites
        self.copies = ExpiringCopies[int]()
        self.expired = 0  # copies that left after their TTL
        self._expiring = False  # whether a look for copies whose TTL is over is due
        self._block_bytes = self.model.block_bytes(config.block_tokens) * config.kv_scale
        self._readers = sum("prefill" in node.roles for node in self.nodes)
        self._second: dict[str, SecondHit[int]] = {}  # by node, as the others
        self._budgets: dict[tuple[str, str], LinkBudget] = {}
        self._ways: dict[tuple[str, str], TransferModel] = {}
        self._crossed: dict[Job, tuple[int, int, list[bool]]] = {}  # positions of far blocks, and which become copies

    # --- requests

    def begin(self, jobs: Sequence[Job]) -> None:
        """These are the requests that arrive here first."""
        self.jobs.extend(jobs)
        self._begin()

    def offer(self, job: Job, own: bool) -> SiteCost:
        """What it costs to compute the job here, as an acceptor sees it: from gossip, and from the pool if this is its
        `own` site."""
        demand = self._demand(job)
        if not own:
            demand = replace(demand, pool_tokens=0, ssd_s=0.0, ssd_tokens=0, dram_tokens=0)
        view, matched = self.placing.told_here(job)
        distance_s = 0.0 if own else self.rules.distance_s
        return site_cost(self.loop.now, demand, view, matched, self.name, distance_s, self.config.threshold)

    def arrived(self, job: Job) -> None:
        """It is computed here."""
        self._arrive(job)

    def take(self, job: Job) -> None:
        """From another site. It arrives after a whole round trip, so that its first token is late by the way there and
        the way back."""
        self.jobs.append(job)
        self._left += 1
        self.loop.after(self.rules.distance_s, self._arrive, job)

    def pass_on(self, job: Job) -> None:
        """Another site takes it."""
        self.jobs.remove(job)
        self._left -= 1

    def _gossip(self) -> None:
        self.placing.gossip()
        if self._left or any(other.unfinished for other in self.others):
            self.loop.after(self.config.gossip_s, self._gossip)

    # --- prices

    def _far_prefix(self, node: Node, job: Job, known: int) -> FarFetch | None:
        size = self.config.block_tokens
        first, end = known // size, (job.input_tokens - 1) // size
        if self.rules.kv == "none" or first >= end or known % size:
            return None

        def compute_s(blocks: int) -> float:
            return node.costs.prompt_s(blocks * size, known)

        asking_s, asked = self.rules.distance_s, False
        best: tuple[float, Site, int] | None = None
        for other in self.others:
            if self._saves_s(node, other, end - first, compute_s) <= asking_s:
                continue
            asked = True
            blocks = other.pool.run(job.blocks[:end]) - first
            if blocks > 0:
                saved_s = self._saves_s(node, other, blocks, compute_s)
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    best = saved_s, other, blocks
        if best is None:
            return FarFetch(0, partial(self.loop.after, asking_s)) if asked else None
        _, other, blocks = best
        self._budget(node, other).book(blocks * self._block_bytes)
        return FarFetch(blocks * size, partial(self._ask, node, other, job, first, blocks))

    def _saves_s(self, node: Node, other: Site, blocks: int, compute_s: Callable[[int], float]) -> float:
        nbytes = blocks * self._block_bytes
        wait_s = self._budget(node, other).wait_s(self.loop.now, nbytes)
        return far_saves_s(compute_s(blocks), self._way(node, other), nbytes, wait_s)

    # --- a fetch

    def _ask(self, node: Node, other: Site, job: Job, first: int, blocks: int, done: Callable[[], None]) -> None:
        far = job.blocks[first : first + blocks]
        other.read_by_others(far)

        def over() -> None:
            admitted = self._seen(node).crossed(self.loop.now, far)
            self._crossed[job] = first, first + blocks, admitted if self.rules.kv == "copies" else [False] * blocks
            done()

        self.loop.after(self.rules.distance_s, self._cross, node, other, blocks, over)

    def _cross(self, node: Node, other: Site, blocks: int, done: Callable[[], None]) -> None:
        """A bucket of the budget after the other."""
        budget, now = self._budget(node, other), self.loop.now
        count = budget.at_once(blocks)
        nbytes = count * self._block_bytes
        if not budget.take(now, int(nbytes)):
            self.loop.after(budget.pause_s(nbytes), self._cross, node, other, blocks, done)
            return
        budget.unbook(nbytes)

        def arrived() -> None:
            self.far_bytes += nbytes
            self._way(node, other).observe(int(nbytes), self.loop.now - now)
            if blocks > count:
                self._cross(node, other, blocks - count, done)
            else:
                done()

        link = f"{other.name}>{self.name}"
        self.between.send(link, f"{link} end", nbytes, arrived)

    def read_by_others(self, blocks: Sequence[int]) -> None:
        """Another site reads these from the pool here."""
        self.copies.used(self.loop.now, blocks)
        self._homed.read(blocks, _nothing)

    # --- copies

    def _publish(self, node: Node, job: Job, blocks: Sequence[int]) -> None:
        """Blocks of other sites are published only as copies; what this site computed, or had, as always."""
        first, end, admitted = self._crossed.pop(job, (0, 0, []))
        known = job.prefix_tokens // self.config.block_tokens
        self.copies.used(self.loop.now, blocks[:known])
        self.copies.own(blocks[known:])
        far = [block for block, copied in zip(blocks[first:end], admitted, strict=False) if not copied]
        copies = [block for block, copied in zip(blocks[first:end], admitted, strict=False) if copied]
        self.copies.arrived(self.loop.now, copies, self.rules.ttl_s)
        self._expire_later()
        if not far:
            super()._publish(node, job, blocks)
            return
        for part in (blocks[:first], copies, blocks[end:]):
            if part:
                super()._publish(node, job, part)

    def _expire_later(self) -> None:
        """At most one look is due: each publication would begin another chain of them."""
        if len(self.copies) and not self._expiring:
            self._expiring = True
            self.loop.after(self.rules.ttl_s / EXPIRY_LOOKS, self._expire)

    def _expire(self) -> None:
        self._expiring = False
        over = self.copies.expired(self.loop.now)
        self.expired += len(over)
        self._homed.drop(over)
        self._expire_later()

    # --- by node

    def _budget(self, node: Node, other: Site) -> LinkBudget:
        pair = node.name, other.name
        if pair not in self._budgets:
            made = self._budgets[pair] = LinkBudget(
                self.rules.budget * self.rules.link_bytes_s, int(self._block_bytes) + 1
            )
            made.divided(self.loop.now, self._readers)
        return self._budgets[pair]

    def _way(self, node: Node, other: Site) -> TransferModel:
        prior = TransferModel(self.rules.distance_s, self.rules.budget * self.rules.link_bytes_s)
        return self._ways.setdefault((node.name, other.name), prior)

    def _seen(self, node: Node) -> SecondHit[int]:
        return self._second.setdefault(node.name, SecondHit(self.rules.ttl_s))


def _nothing() -> None:
    """Nobody waits for a read of blocks in DRAM."""

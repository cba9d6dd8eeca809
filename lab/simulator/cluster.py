"""Moves requests through a cluster: places, queues, computes, hands over and decodes them. The classes of sched/
place them with the knowledge of a node (lab/simulator/placing.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Self

from cache.groups import PoolRule
from lab.loads.trace import TraceRow
from lab.simulator import making
from lab.simulator.arena.accounts import FactsByPosition
from lab.simulator.config import SimConfig
from lab.simulator.failures import Failures, Parts
from lab.simulator.job import Job
from lab.simulator.lengths import Lengths
from lab.simulator.links import SimLinks
from lab.simulator.migration import Migration
from lab.simulator.models.contention import Contention
from lab.simulator.models.expert_ranks import ExpertRanks
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import FETCH, HANDOVER
from lab.simulator.models.presets import chosen
from lab.simulator.models.step_models import StepModel, with_bandwidth
from lab.simulator.node import Node
from lab.simulator.placing import Answers, Placing
from lab.simulator.predictors import equip
from lab.simulator.refusals import Refusals
from lab.simulator.rivals.dynaserve import SplitPlacement
from lab.simulator.rivals.nexus import Halves
from lab.simulator.roles import Roles
from lab.simulator.scaling import Scaling
from sched.placement.choice import Placement, PlacementPolicy, Rejected
from sched.placement.demand import Demand
from sched.placement.pooled import PooledPrefix


@dataclass(frozen=True, slots=True)
class FarFetch:
    """Tokens that come from another site; begin(done): fetch them, then call `done`. With 0 tokens it only asks."""

    tokens: int
    begin: Callable[[Callable[[], None]], None]


def job_of(index: int, row: TraceRow) -> Job:
    """The request of a row."""
    output = max(1, row.output_length)
    return Job(
        index, row.timestamp_ms / 1000, row.input_length, output, tuple(row.hash_ids), row.service_class, row.session
    )


class Cluster:
    """One run. `jobs` are all requests so far, in the order of their arrival."""

    def __init__(self, config: SimConfig, model: StepModel | None = None, loop: Loop | None = None) -> None:
        """`model` replaces the config's; `loop`: the clock, if others use it too. Raises KeyError for unknown policies,
        ValueError, OSError."""
        if model is None:
            rule = PoolRule(config.pool_windows, config.state_every)
            ranks = ExpertRanks(config.expert_ranks, config.expert_copies) if config.expert_ranks else None
            model = chosen(config.model, config.model_geometry, config.hardware, rule, ranks)
        if config.kv_blocks:
            model = replace(model, kv_tokens=config.kv_blocks * config.block_tokens)
        self.model = with_bandwidth(model, config.nic_gbit_s) if config.nic_gbit_s else model
        self.config = config
        self.loop = Loop() if loop is None else loop
        self.jobs: list[Job] = []
        self.rng = Random(config.seed)
        self.network = making.network(config, self.model, self.loop)
        self.lengths = Lengths(config.output_lengths)
        self._facts = FactsByPosition(config.block_tokens, self.model.prompt_s)
        self.nodes = making.nodes(config, self.model, self.loop, self, self._slowness, self.lengths, self._facts)
        self.contention = Contention(config.contention, self.nodes)
        self.halves = Halves(config.prefill_share, self.nodes, config.prefill)
        self.by_name = {node.name: node for node in self.nodes}
        self.homes = making.homes(config)
        self.disks = making.disks(config, self.model, self.loop, len(self.homes))
        self.pool = making.pool(config, self.model, self.disks, self.homes)
        told = self.network.places if config.known_places else {}
        self.links = SimLinks(config.links, self.network, self.loop, config.seed, told)
        self.slowness = [1.0] * len(self.nodes)
        self._told_costs: list[tuple[tuple[float, float, float], float] | None] = [None] * len(self.nodes)
        candidates = [making.candidate(config, node) for node in self.nodes]
        reused = None if self.model.kv is None else self._reused
        self.placing = Placing(
            config, self.loop, self.rng, candidates, self.links, Answers(self._step_soon, reused), self._equip
        )
        self.live = self.placing.live
        for node in self.nodes:
            making.announce(self.loop, self.placing, node)
        self._left = 0
        parts = Parts(self.by_name, self.network, self.placing, self.pool)
        self.failures = Failures(config, self.loop, parts, self.jobs, self.changed, self.place, self.slowness)
        self.refusals = Refusals(config, self.model, self.by_name, self.lengths.ended)
        self.scaling = Scaling(config, self.loop, parts, self.changed, lambda: self.unfinished)
        self.migration = Migration(config, self.model, self.loop, parts, self.lengths, self.changed, lambda: self._left)
        self.turns = making.turns(config, self.loop, self.pool)
        self.roles = Roles(config, self.loop, self.by_name, self.live, self.changed, lambda: self.unfinished)

    # --- a run

    def run(self, rows: Iterable[TraceRow]) -> Iterator[int]:
        """Simulate; yields the number of requests done every thousand events."""
        for index, row in enumerate(rows):
            job = job_of(index, row)
            self.jobs.append(job)
            self.loop.at(job.arrival, self._arrive, job)
        self._begin()
        while self._left and self.loop.step():
            if self.loop.events % 1000 == 0:
                yield len(self.jobs) - self._left

    def _begin(self) -> None:
        """`jobs` are all requests that will arrive here first."""
        self._left = len(self.jobs)
        self.failures.schedule(max((job.arrival for job in self.jobs), default=0.0))
        self.scaling.schedule(min((job.arrival for job in self.jobs), default=0.0))
        self.roles.schedule(min((job.arrival for job in self.jobs), default=0.0))
        self.migration.schedule(min((job.arrival for job in self.jobs), default=0.0))
        if not self.placing.policy.asks_everybody:
            self.loop.at(self.jobs[0].arrival if self.jobs else 0.0, self._gossip)

    def played(self, rows: Iterable[TraceRow]) -> Self:
        """Simulate all of it."""
        for _ in self.run(rows):
            pass
        return self

    @property
    def unfinished(self) -> int:
        """Requests that are neither answered nor refused."""
        return self._left

    # --- placement

    def _arrive(self, job: Job) -> None:
        if self.turns is not None:
            self.turns.begun(job)
        self.placing.arrivals.count(self.loop.now)
        self.place(job)

    def place(self, job: Job) -> None:
        now = self.loop.now
        made = self.placing.decide(self._demand(job), job)
        decision, view = made.placement, made.view
        if isinstance(decision, Rejected):
            self._refuse(job, decision.reason)
            return
        if self.by_name[decision.prefill].down or self.by_name[decision.decode].down:
            self.loop.after(self.config.retry_s, self.place, job)
            return
        refusal = self.refusals.at_arrival(job, decision, view)
        if refusal is not None:
            self._refuse(job, refusal.reason)
            return
        asking_s = max(made.questions * self.config.probe_s, self.config.lookup_s if self.pool.capacity else 0.0)
        job.sent, job.placed, job.estimates = now, now + self.model.front_s + asking_s, decision.estimates
        job.prefill, job.decode, job.source = decision.prefill, decision.decode, decision.prefix_source
        job.estimate_s = decision.estimates["ttft_s"] + job.placed - job.arrival
        self.placing.charge(made.cell, decision)
        self._send(job, decision)

    def _demand(self, job: Job) -> Demand:
        pooled, scale, model = self._pooled(job).worth_fetching(self.live), self.config.kv_scale, self.model
        fetched = model.fetch_bytes(pooled.tokens) / pooled.tokens if pooled.tokens else model.token_bytes
        return Demand(
            num_tokens=job.input_tokens,
            max_tokens=self.lengths.expected(job),
            pool_tokens=pooled.tokens,
            block_size=self.config.block_tokens,
            handover_token_bytes=model.handover_bytes(job.input_tokens) / job.input_tokens * scale,
            fetch_token_bytes=fetched * scale,
            service_class=job.service_class,
            ssd_s=pooled.ssd_s,
            ssd_tokens=pooled.ssd_tokens,
            dram_tokens=pooled.dram_tokens,
        )

    def _pooled(self, job: Job) -> PooledPrefix:
        """The job's prefix in the pool, now: an acceptor asks the homes for each prompt (--lookup-s), and every home
        adds the time of its SSD behind the reads that are queued at that moment (cache/ssd_reads.py). So nothing of
        this is old on a real node either. That home fits the rate of its disk; here it knows the rate, and the
        writes behind too."""
        size, blocks = self.config.block_tokens, job.blocks[: self.pool.run(job.blocks)]
        cold, tokens = self.pool.cold(blocks), self._reused(job, len(blocks) * size)
        return PooledPrefix(
            tokens=tokens,
            dram_tokens=min(tokens, self.pool.dram_run(blocks) * size) if cold else tokens,
            ssd_tokens=cold.total() * size,
            ssd_s=self.pool.read_s(cold),
        )

    def _refuse(self, job: Job, reason: str) -> None:
        job.refused = reason
        self._left -= 1

    # --- from placement to the last token

    def _send(self, job: Job, decision: Placement) -> None:
        decode, attempt = self.by_name[decision.decode], job.retries
        decode.promise(job)

        def ask() -> None:
            if job.retries == attempt:
                decode.reserve(job, partial(self._to_prefill, job, decision))

        if self.config.reservations and decision.decode != decision.prefill:
            self.loop.at(job.placed, ask)
        else:
            self._to_prefill(job, decision)

    def _to_prefill(self, job: Job, decision: Placement) -> None:
        prefill = self.by_name[decision.prefill]
        job.split = decision.split_tokens if isinstance(decision, SplitPlacement) else 0
        own = self._own_tokens(prefill, job)
        # the pool may have lost some of it while the prompt waited for memory
        pooled = min(decision.prefix_tokens, self.pool.run(job.blocks) * self.config.block_tokens)
        if prefill.arena.keeps and (most := own + self._whole(prefill.arena.left)) < pooled:
            pooled = self._reused(job, most)  # as much as there is room for
        fetched = max(own, pooled) if decision.prefix_source == "pool" else own
        more = self._far_prefix(prefill, job, fetched)
        far = 0 if more is None else more.tokens
        job.prefix_tokens = job.computed = fetched + far
        job.fetched_tokens = fetched + far - own
        job.source = "site" if far else "pool" if fetched > own else "local" if own else "none"
        job.prefill_s = prefill.costs.prompt_s(job.num_uncomputed, job.computed)
        if job.computed > own:
            prefill.arena.load(job, job.computed)
        prefill.expect(job)
        nbytes = self.model.fetch_bytes(fetched, own) * self.config.kv_scale
        begun, attempt, size = max(job.placed, self.loop.now), job.retries, self.config.block_tokens
        blocks, cold = job.blocks[own // size : fetched // size], False

        def read() -> None:
            nonlocal cold
            found = self.pool.cold(blocks)
            cold, job.ssd_tokens = bool(found), found.total() * size
            self.pool.read(blocks, partial(self._collect, self.pool.sources(blocks), prefill.name, nbytes, ready))

        def ready() -> None:
            if job.retries == attempt:
                job.fetched = self.loop.now - begun if nbytes else 0.0
                if not cold:  # a disk is not part of the network path
                    self.links.fetched(prefill.name, nbytes, job.fetched)
                if more is None:
                    prefill.ready(job)
                else:
                    more.begin(partial(self._far_ready, prefill, job, attempt))

        if nbytes:
            self.loop.at(begun, read)
        else:
            self.loop.at(begun, ready)

    def _far_prefix(self, node: Node, job: Job, known: int) -> FarFetch | None:
        """What comes from other sites behind the first `known` tokens (lab/simulator/sites/)."""
        return None

    def _far_ready(self, prefill: Node, job: Job, attempt: int) -> None:
        if job.retries == attempt:
            prefill.ready(job)

    def _own_tokens(self, node: Node, job: Job) -> int:
        """Leading tokens that the node has, in whole blocks; one is always left to compute. From now on the job uses
        them."""
        size = self.config.block_tokens
        found = min(node.arena.run(job.blocks), (job.input_tokens - 1) // size) * size
        own = min(self._reused(job, found), job.goal)
        node.arena.adopt(job, job.blocks[: own // size])
        return own

    def _whole(self, tokens: int) -> int:
        """Of these tokens, those in whole blocks."""
        return max(0, tokens // self.config.block_tokens) * self.config.block_tokens

    def _reused(self, job: Job, found: int) -> int:
        """The leading tokens of the job that are not computed, of `found` ones in whole blocks: up to a border at which
        all groups can go on, with a token left to compute."""
        if self.model.kv is None:
            return found
        size = self.config.block_tokens
        return self.model.reused(min(found, (job.input_tokens - 1) // size * size), size)

    def _collect(self, sources: Counter[int], target: str, nbytes: float, done: Callable[[], None]) -> None:
        """Move `nbytes` from the sources to `target`, as much from each as it has blocks; then call `done`."""
        left, blocks = len(sources), sources.total()

        def one() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        parts = {self.homes[home]: nbytes * count / blocks for home, count in sources.items()}
        self.network.gather(parts, target, one, FETCH)

    def prefill_begun(self, node: Node, job: Job) -> None:
        """Skip the tokens that another prompt has computed here since the placement. What a prompt gave back while it
        waited may be gone."""
        gave_back = node.arena.was_stripped(job)
        own = self._own_tokens(node, job)
        if own > job.computed or gave_back:
            node.found(job, own, node.costs.prompt_s(job.goal - own, own))
            job.prefix_tokens, job.source = own, "local" if own else "none"
            job.fetched_tokens, job.ssd_tokens = min(job.fetched_tokens, own), min(job.ssd_tokens, own)
        if self.config.kv_overlap == "layer" and job.decode != node.name:
            job.log.append((self.loop.now, "moving"))
            self._move(node, job)

    def prefilled(self, node: Node, job: Job) -> None:
        blocks = job.blocks[: job.goal // self.config.block_tokens] or job.blocks
        if not job.resumed and not job.split:
            self.placing.acceptors.observed(job)
        self._publish(node, job, blocks)
        if job.output_tokens == 1 and not job.split:
            job.finished = self.loop.now
            self.by_name[job.decode].release(job)
            self.finished(node, job)
        elif job.decode == node.name:
            node.join(job)
        elif self.config.kv_overlap == "none":
            self._move(node, job)
        else:
            self._arrived(job, job.retries)

    def _publish(self, node: Node, job: Job, blocks: Sequence[int]) -> None:
        """The blocks of a computed prompt go to their homes in the pool."""
        if self.config.publish == "home":
            block_bytes = self.model.block_bytes(self.config.block_tokens) * self.config.kv_scale
            missing = self.pool.missing(blocks).items() if self.pool.capacity else ()
            parts = {self.homes[home]: count * block_bytes for home, count in missing}
            self.network.scatter(node.name, parts, _nothing)
        self.pool.use(blocks, self._facts.first(len(blocks)))

    def _move(self, node: Node, job: Job) -> None:
        together = self.halves.together(node.index, self.by_name[job.decode].index)
        nbytes = 0 if together else self.model.handover_bytes(job.goal) * self.config.kv_scale
        attempt, begun = job.retries, self.loop.now

        def moved() -> None:
            if nbytes:
                self.links.handed_over(node.name, job.decode, nbytes, self.loop.now - begun)
            self._arrived(job, attempt)

        self.network.send(node.name, job.decode, nbytes, moved, HANDOVER)

    def _arrived(self, job: Job, attempt: int) -> None:
        """An overlapped hand-over is done when the last layer is computed and the last byte has arrived."""
        if job.retries != attempt:
            return
        if self.config.kv_overlap == "layer":
            job.log.append((self.loop.now, "half"))
            if sum(what == "half" for _, what in job.log) < 2:
                return
        if self.model.handover_s:
            self.loop.after(self.model.handover_s, self._join, job, attempt)
        else:
            self._join(job, attempt)

    def _join(self, job: Job, attempt: int) -> None:
        if job.retries != attempt:
            return
        node = self.by_name[job.decode]
        if job.split:
            self._go_on(node, job)
            return
        refusal = self.refusals.after_prefill(job, node)
        if refusal is None:
            node.join(job)
            return
        node.release(job)
        self.changed(node)
        self._refuse(job, refusal.reason)

    def _go_on(self, node: Node, job: Job) -> None:
        """The KV of the first part of the prompt is here: compute the rest."""
        job.split, job.log = 0, []
        if not node.down:
            job.prefill_s = node.costs.prompt_s(job.num_uncomputed, job.computed)
            node.expect(job)
            node.ready(job)

    def finished(self, node: Node, job: Job) -> None:
        self._left -= 1
        if self.turns is not None:
            self.turns.over(job, list(job.blocks[: job.input_tokens // self.config.block_tokens]))
        self.lengths.ended.ended(job.answer_tokens)

    def preempted(self, node: Node, job: Job) -> None:
        """Its KV is gone: this node computes the prompt and the answer so far again."""
        job.restart(self.loop.now)
        job.preemptions += 1
        job.prefill, job.source, job.sent = node.name, "none", self.loop.now
        job.prefill_s = node.costs.prompt_s(job.num_uncomputed, 0)
        node.promise(job)
        node.expect(job)
        node.ready(job)

    def changed(self, node: Node) -> None:
        """Update the live columns of the node."""
        live, i = self.live, node.index
        self.contention.changed(i)
        self.halves.changed(i)
        live.queue(i, self.loop.now + node.known_slowness * node.queued_s, node.waiting, node.queued_tokens)
        live.running[i] = len(node.batch.running)
        told = node.costs.prefill, node.known_slowness
        if self._told_costs[i] != told:
            self._told_costs[i] = told
            live.prefill[:, i] = [coefficient * node.known_slowness for coefficient in node.costs.prefill]
        live.free_blocks[i] = node.free_tokens // self.config.block_tokens
        if live.decodes[i]:
            live.step_s[i] = node.step_s()

    # --- queries

    def _slowness(self, index: int) -> float:
        """The present slowness of that node's steps."""
        return self.slowness[index] * self.contention.slowness(index) * self.halves.slowness(index)

    def _equip(self, policy: PlacementPolicy) -> None:
        equip(policy, self.config, self.by_name, self.slowness)

    def _step_soon(self, node: int, seconds: float, tokens: int) -> float:
        return self.refusals.step_soon(self.nodes[node], seconds, tokens)

    def _gossip(self) -> None:
        self.placing.gossip()
        if self._left:
            self.loop.after(self.config.gossip_s, self._gossip)


def _nothing() -> None:
    """The pool already lists blocks from the end of their prefill on."""

"""Requests through a cluster: placed by the classes of sched/ on what a node would know (sim/placing.py), then queued,
computed, handed over and decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from cache.policies import policies
from cache.policy import Facts
from sched.placements.choice import Placement, Rejected
from sched.placements.demand import Demand
from sched.placements.view import Candidate, View
from sched.queueing import queue_orders
from sched.rejection import Estimate, rejections
from sim.caches import Cache
from sim.config import SimConfig
from sim.failures import Failures
from sim.job import Job
from sim.links import SimLinks
from sim.loop import Loop
from sim.models import PRESETS, StepModel, with_bandwidth
from sim.network import Network
from sim.node import Node
from sim.placing import Placing
from sim.roles import Roles
from sim.trace import TraceRow


class Cluster:
    """One run. `jobs` are all requests so far, in the order of their arrival."""

    def __init__(self, config: SimConfig, model: StepModel | None = None) -> None:
        """`model` in place of the preset that the config names. Raises KeyError for unknown names, ValueError."""
        model = PRESETS[config.model] if model is None else model
        self.model = with_bandwidth(model, config.nic_gbit_s) if config.nic_gbit_s else model
        self.config = config
        self.loop = Loop()
        self.jobs: list[Job] = []
        self.rng = Random(config.seed)
        self.network = Network(self.loop, self.model.nic_bytes_s, self.model.nic_latency_s)
        self.nodes = [self._node(i, name, roles) for i, (name, roles) in enumerate(_names(config))]
        if not self.nodes:
            raise ValueError("the cluster has no nodes: give --prefill and --decode, or --mixed")
        self.by_name = {node.name: node for node in self.nodes}
        size = len(self.nodes)
        self.pool = Cache(policies[config.eviction](), config.pool_blocks * size)
        self.rejection = rejections[config.rejection]()
        self._facts: list[Facts] = []
        wire = self.model.token_bytes * config.kv_scale
        self._wire_bytes = wire
        self.links = SimLinks(config.links, self.network)
        candidates = [self._candidate(node) for node in self.nodes]
        self.placing = Placing(config, self.loop, self.rng, candidates, self.links)
        self.live = self.placing.live
        self.caches = [self._cache(node) for node in self.nodes]
        self._left = 0
        self.failures = Failures(self)
        self.roles = Roles(self)

    # --- a run

    def run(self, rows: Iterable[TraceRow]) -> Iterator[int]:
        """Simulate; yields the number of requests done every thousand events."""
        for index, row in enumerate(rows):
            at = row.timestamp_ms / 1000
            job = Job(index, at, row.input_length, max(1, row.output_length), tuple(row.hash_ids), row.service_class)
            self.jobs.append(job)
            self.loop.at(at, self._arrive, job)
        self._left = len(self.jobs)
        self.failures.schedule(max((job.arrival for job in self.jobs), default=0.0))
        self.roles.schedule(min((job.arrival for job in self.jobs), default=0.0))
        if not self.placing.policy.asks_everybody:
            self.loop.at(self.jobs[0].arrival if self.jobs else 0.0, self._gossip)
        while self._left and self.loop.step():
            if self.loop.events % 1000 == 0:
                yield len(self.jobs) - self._left

    @property
    def unfinished(self) -> int:
        """Requests that are neither answered nor refused."""
        return self._left

    # --- placement

    def _arrive(self, job: Job) -> None:
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
        onto = view.index[decision.decode]
        if self.config.rejection != "none":  # the estimate looks at the requests of every node
            refusal = self.rejection.at_arrival(self._estimate(job, decision, view, onto), self.config.slo_scale)
            if refusal is not None:
                self._refuse(job, refusal.reason)
                return
        job.sent, job.placed = now, now + made.questions * self.config.probe_s
        job.prefill, job.decode, job.source = decision.prefill, decision.decode, decision.prefix_source
        job.estimate_s = decision.estimates["ttft_s"] + job.placed - job.arrival
        self.placing.charge(made.cell, decision)
        self._send(job, decision)

    def _demand(self, job: Job) -> Demand:
        pooled = self.pool.run(job.blocks) * self.config.block_tokens if self.pool.capacity else 0
        return Demand(
            num_tokens=job.input_tokens,
            max_tokens=job.output_tokens,
            pool_tokens=pooled,
            block_size=self.config.block_tokens,
            token_bytes=round(self._wire_bytes),
            service_class=job.service_class,
        )

    def _estimate(self, job: Job, decision: Placement, view: View, onto: int) -> Estimate:
        node = self.by_name[decision.decode]
        step_s = float(view.step_s[onto])
        return Estimate(
            service_class=job.service_class,
            ttft_s=decision.estimates["ttft_s"],
            wait_s=decision.estimates["wait_s"],
            step_s=step_s,
            step_soon_s=self._step_soon(node, decision.estimates["ttft_s"]),
            step_alone_s=self.model.decode_s(1, job.input_tokens),
            decode_s=job.output_tokens * step_s,
        )

    def _step_soon(self, node: Node, seconds: float) -> float:
        """The decode step of `node` when the prompt would arrive: without those done by then."""
        step_s = max(node.step_s(), 1e-9)
        steps = seconds / step_s
        staying = [job for job in node.batch if job.output_tokens - job.decoded > steps]
        coming = list(self.coming_to(node))
        context = sum(job.context for job in staying) + sum(job.input_tokens for job in coming)
        return self.model.decode_s(len(staying) + len(coming) + 1, context)

    def coming_to(self, node: Node) -> Iterator[Job]:
        """Requests placed to decode on `node` that are not there yet."""
        for other in self.nodes:
            yield from (job for job in other.queue if job.decode == node.name)
            yield from (job for job in other.coming if job.decode == node.name)

    def _refuse(self, job: Job, reason: str) -> None:
        job.refused = reason
        self._left -= 1

    # --- from placement to the last token

    def _send(self, job: Job, decision: Placement) -> None:
        prefill, decode = self.by_name[decision.prefill], self.by_name[decision.decode]
        own = self._own_tokens(prefill, job)
        fetched = max(own, decision.prefix_tokens) if decision.prefix_source == "pool" else own
        job.prefix_tokens = job.computed = fetched
        job.source = "pool" if fetched > own else "local" if own else "none"
        job.prefill_s = self.model.prompt_s(job.num_uncomputed, job.computed)
        decode.promise(job)
        prefill.expect(job)
        nbytes = (fetched - own) * self._wire_bytes
        begun, attempt = job.placed, job.retries

        def ready() -> None:
            if job.retries == attempt:
                job.fetched = self.loop.now - begun if nbytes else 0.0
                self.links.fetched(prefill.name, nbytes, job.fetched)
                prefill.ready(job)

        if nbytes:
            self.loop.at(begun, self.network.send, self._home(job), prefill.name, nbytes, ready)
        else:
            self.loop.at(begun, ready)

    def _own_tokens(self, node: Node, job: Job) -> int:
        """Leading tokens that the node has, in whole blocks; one is always left to compute."""
        size = self.config.block_tokens
        return min(self.caches[node.index].run(job.blocks), (job.input_tokens - 1) // size) * size

    def _home(self, job: Job) -> str:
        """Pooled blocks are spread over all nodes; a prefix comes from many, here from one drawn by its content."""
        return self.nodes[hash((job.blocks[0], len(job.blocks))) % len(self.nodes)].name

    def prefill_begun(self, node: Node, job: Job) -> None:
        """What another prompt has left here since it was placed is not computed again."""
        own = self._own_tokens(node, job)
        if own > job.computed:
            node.found(job, own, self.model.prompt_s(job.input_tokens - own, own))
            job.prefix_tokens, job.source = own, "local"
        if self.config.kv_overlap == "layer" and job.decode != node.name:
            job.log.append((self.loop.now, "moving"))
            self._move(node, job)

    def prefilled(self, node: Node, job: Job) -> None:
        blocks = job.blocks[: job.input_tokens // self.config.block_tokens] or job.blocks
        while len(self._facts) < len(blocks):
            size, position = self.config.block_tokens, len(self._facts)
            self._facts.append(Facts(position, self.model.prompt_s(size, size * position)))
        self.caches[node.index].use(blocks, self._facts)
        self.pool.use(blocks, self._facts)
        if job.output_tokens == 1:
            job.finished = self.loop.now
            self.by_name[job.decode].release(job)
            self.finished(node, job)
        elif job.decode == node.name:
            node.join(job)
        elif self.config.kv_overlap == "none":
            self._move(node, job)
        else:
            self._arrived(job, job.retries)

    def _move(self, node: Node, job: Job) -> None:
        nbytes = job.input_tokens * self._wire_bytes
        attempt, begun = job.retries, self.loop.now

        def moved() -> None:
            self.links.handed_over(node.name, job.decode, nbytes, self.loop.now - begun)
            self._arrived(job, attempt)

        self.network.send(node.name, job.decode, nbytes, moved)

    def _arrived(self, job: Job, attempt: int) -> None:
        """Overlapped, a hand-over is done when both the last layer is computed and the last byte is there."""
        if job.retries != attempt:
            return
        if self.config.kv_overlap == "layer":
            job.log.append((self.loop.now, "half"))
            if sum(what == "half" for _, what in job.log) < 2:
                return
        self.by_name[job.decode].join(job)

    def finished(self, node: Node, job: Job) -> None:
        self._left -= 1

    def changed(self, node: Node) -> None:
        """Keep the live columns."""
        live, i = self.live, node.index
        live.queue(i, self.loop.now + node.known_slowness * node.queued_s, node.waiting, node.queued_tokens)
        live.running[i] = len(node.batch)
        live.free_blocks[i] = node.free_tokens // self.config.block_tokens
        if live.decodes[i]:
            live.step_s[i] = node.step_s()

    # --- what is known

    def _gossip(self) -> None:
        self.placing.gossip()
        if self._left:
            self.loop.after(self.config.gossip_s, self._gossip)

    # --- making

    def _node(self, index: int, name: str, roles: tuple[str, ...]) -> Node:
        chunk = self.config.chunk_tokens or self.model.chunk_tokens
        order = queue_orders[self.config.queue_order]()

        def slowness(now: float) -> float:
            return self.failures.slowness[index]

        return Node(self.loop, index, name, roles, self.model, order, self, chunk, slowness)

    def _cache(self, node: Node) -> Cache:
        def changed(block: int, here: bool) -> None:
            self.placing.exact.tell(self.loop.now, node.index, block, here)
            self.placing.told.tell(self.loop.now, node.index, block, here)

        prefills = "prefill" in node.roles or self.config.role_changes
        capacity = self.config.cache_blocks if prefills else 0
        return Cache(policies[self.config.eviction](), capacity, changed)

    def _candidate(self, node: Node) -> Candidate:
        blocks = self.model.kv_tokens // self.config.block_tokens
        return Candidate(
            node_id=node.name,
            roles=node.roles,
            prefill=self.model.prefill,
            free_blocks=blocks,
            total_blocks=blocks,
            step_s=node.step_s() if "decode" in node.roles else 0.0,
        )


def _names(config: SimConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    for role, count in (("prefill", config.prefill), ("decode", config.decode)):
        yield from ((f"{role}-{i}", (role,)) for i in range(count))
    yield from ((f"mixed-{i}", ("prefill", "decode")) for i in range(config.mixed))

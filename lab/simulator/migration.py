"""Running requests that move between decode nodes: the rules of sched/migration.py on the present state of the nodes.
engine/migration/ runs them on gossiped state, which is 0.1 s older.

A move copies the KV of a request while it runs. Then the request leaves the batch at the end of a step, the KV of the
tokens that were made meanwhile follows, and the request joins the batch of the other node: the pause is that copy and
the rest of the other node's step. A request that ended or was preempted meanwhile stays. One move at a time leaves a
node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lab.simulator.config import SimConfig
from lab.simulator.failures import Parts
from lab.simulator.job import Job
from lab.simulator.lengths import Lengths
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import HANDOVER
from lab.simulator.models.step_models import StepModel
from lab.simulator.node import Node
from sched.migration import Balancer, DecodeNode, Movable, in_need, to_balance

BLOCK_TOKENS = 16
"""Of the blocks in which the rules count: those of an arena, not of the trace."""

SETTLE_S = 0.5
"""Of engine/migration/migrator.py: a node rests so long after a move."""


class Migration:
    """The moves of one run. `begun`: their number by reason; `pauses`: seconds in which a moved request was on no node;
    `given_up`: copies of requests that had ended or lost their KV."""

    def __init__(
        self,
        config: SimConfig,
        model: StepModel,
        loop: Loop,
        parts: Parts,
        lengths: Lengths,
        changed: Callable[[Node], None],
        unfinished: Callable[[], int],
    ) -> None:
        """changed(node): its columns may be outdated; unfinished(): number of open requests; moves stop at 0."""
        self.begun = {"balance": 0, "pressure": 0}
        self.given_up = 0
        self.pauses: list[float] = []
        self._config, self._model, self._loop, self._network = config, model, loop, parts.network
        self._by_name, self._lengths = parts.nodes, lengths
        self._changed, self._unfinished = changed, unfinished
        self._nodes = [node for node in parts.nodes.values() if "decode" in node.roles]
        self._balancers = {node.name: Balancer(node.name) for node in self._nodes}
        self._moving: set[str] = set()  # nodes that a request leaves
        self._quiet_until = dict.fromkeys(parts.nodes, 0.0)

    def schedule(self, begin: float) -> None:
        """Start with the first request."""
        if self._config.migration == "balance":
            self._loop.at(begin, self._look)

    # --- the decision

    def _look(self) -> None:
        states = [_state(node) for node in self._nodes]
        for node, me in zip(self._nodes, states, strict=True):
            if node.batch.running and node.name not in self._moving:
                self._decide(node, me, states)
        if self._unfinished():
            self._loop.after(self._config.gossip_s, self._look)

    def _decide(self, node: Node, me: DecodeNode, states: list[DecodeNode]) -> None:
        free = me.blocks_total - me.blocks_used
        if not self._lengths.known and free < len(node.batch.running):
            others = [one for one in states if one is not me]
            if (found := in_need(self._movable(node), free, others)) is not None:
                self._begin(node, found[0], found[1].node_id, "pressure")
                return
        partner = self._balancers[node.name].partner(states) if self._loop.now >= self._quiet_until[node.name] else None
        if partner is not None and (one := to_balance(self._movable(node), me, partner)) is not None:
            self._begin(node, one, partner.node_id, "balance")

    def _movable(self, node: Node) -> list[Movable]:
        """The running requests that have made a token here or elsewhere."""
        return [
            Movable(str(job.index), -(-(job.input_tokens + made) // BLOCK_TOKENS) + 1, self._left(job, made))
            for job, made in zip(node.batch.running, node.made(), strict=True)
        ]

    def _left(self, job: Job, made: int) -> int:
        """Tokens that the request may still make, as the node expects it."""
        if self._lengths.known:
            return job.output_tokens - made
        expected = self._lengths.expected(job)
        return max(expected - made, expected // 2)

    # --- a move

    def _begin(self, node: Node, one: Movable, to: str, why: str) -> None:
        at, job = next((i, job) for i, job in enumerate(node.batch.running) if str(job.index) == one.request_id)
        self.begun[why] += 1
        self._moving.add(node.name)
        self._by_name[to].promise(job)
        context = job.input_tokens + node.made()[at]
        nbytes = self._model.handover_bytes(context) * self._config.kv_scale
        copied = partial(self._copied, node, self._by_name[to], job, job.retries, context)
        self._network.send(node.name, to, nbytes, copied, HANDOVER)

    def _copied(self, node: Node, target: Node, job: Job, attempt: int, context: int) -> None:
        if job.retries != attempt or job not in node.batch.running:
            self._ended(node, target, job, left=False)
            return
        node.give(job, partial(self._left_batch, node, target, job, context))

    def _left_batch(self, node: Node, target: Node, job: Job, context: int, left: bool) -> None:
        """The request is out of the batch of `node`, or has ended there."""
        if not left:
            self._ended(node, target, job, left=False)
            return
        job.decode, job.paused = target.name, self._loop.now
        nbytes = (job.context - context + 1) * self._model.token_bytes * self._config.kv_scale
        self._network.send(node.name, target.name, nbytes, partial(self._arrived, node, target, job), HANDOVER)

    def _arrived(self, node: Node, target: Node, job: Job) -> None:
        self.pauses.append(self._loop.now - job.paused)
        target.join(job)
        self._ended(node, target, job, left=True)

    def _ended(self, node: Node, target: Node, job: Job, left: bool) -> None:
        if not left:
            self.given_up += 1
            target.release(job)
        self._moving.discard(node.name)
        self._quiet_until[node.name] = self._loop.now + SETTLE_S
        self._changed(node)
        self._changed(target)


def _state(node: Node) -> DecodeNode:
    """In the form that the rules take. A mixed node's queue of prompts does not count: it holds no KV yet."""
    batch = node.batch
    return DecodeNode(
        node_id=node.name,
        blocks_used=batch.held_tokens // BLOCK_TOKENS,
        blocks_total=node.model.kv_tokens // BLOCK_TOKENS,
        requests=len(batch.running) + len(batch.joining),
        seats=node.model.max_batch,
    )

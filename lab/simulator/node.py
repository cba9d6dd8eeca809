"""A prefill, decode or mixed node: the queue of prompts, and the steps that it and the batch (batch.py) take.

One step at a time, like the engine: chunks of the first prompts in the queue's order, up to the tokens that the
batching policy allows, and one token of every running request. Without prompts the node makes many decode steps in one
event (segment.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lab.simulator.arena.accounts import Arena
from lab.simulator.batch import Batch
from lab.simulator.job import Job
from lab.simulator.lengths import Lengths
from lab.simulator.models.costs import NodeCosts
from lab.simulator.models.loop import Loop
from lab.simulator.models.noise import Noise
from lab.simulator.models.segment import Segment
from lab.simulator.models.step_models import StepModel
from sched.batching import BatchingPolicy, StepLoad
from sched.queueing import QueueOrder
from sched.stretch import Waiting


class Events(Protocol):
    """The events that a node reports to the cluster."""

    def prefill_begun(self, node: Node, job: Job) -> None: ...

    def prefilled(self, node: Node, job: Job) -> None: ...

    def finished(self, node: Node, job: Job) -> None: ...

    def changed(self, node: Node) -> None: ...

    def preempted(self, node: Node, job: Job) -> None: ...


@dataclass(frozen=True)
class Identity:
    """A node in the cluster. `index`: its place in the cluster's columns."""

    index: int
    name: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """What a node computes with: the time of its steps, and its KV memory."""

    model: StepModel
    arena: Arena


@dataclass(frozen=True)
class Knowledge:
    """Of a node: the time of its steps, and the length of answers."""

    costs: NodeCosts
    lengths: Lengths
    noise: Noise  # of the steps themselves


@dataclass(frozen=True)
class StepRules:
    """The work of one step: at most `chunk_tokens` tokens of at most `prompts` prompts, in the queue's
    `order`."""

    order: QueueOrder
    chunk_tokens: int
    policy: BatchingPolicy
    prompts: int = 1


class Node:
    """Queues and computes the requests that are placed on it."""

    def __init__(
        self,
        loop: Loop,
        seat: Identity,
        machine: Machine,
        rules: StepRules,
        events: Events,
        slowness: Callable[[float], float],
        knows: Knowledge,
    ) -> None:
        """slowness(now): multiplies step times (a slow node)."""
        self.index, self.name, self.roles, self.model = seat.index, seat.name, seat.roles, machine.model
        self.arena = machine.arena
        self.queue: list[Job] = []  # prompts that can be computed
        self.coming: dict[Job, None] = {}  # placed here, but their prefix is on its way
        self.queued_s = 0.0  # estimated prefill work of all of them
        self.batch, self.costs, self._noise = Batch(self.model, knows.lengths, self.arena), knows.costs, knows.noise
        self._factor = 1.0  # of the running step, by a slow node
        self._draft_s = 0.0  # of each running step with decodes, for KV of a draft model
        self.busy_s = 0.0
        self.prompts_s = 0.0  # of it, in steps with prompts
        self.steps = 0
        self.down = False
        self.known_slowness = 1.0
        self._loop, self._events, self._slowness = loop, events, slowness
        self._order, self._chunk_tokens = rules.order, rules.chunk_tokens
        self._policy, self._prompts = rules.policy, rules.prompts
        self._kv_tokens = self.model.kv_tokens - self.model.fixed_tokens
        self._segment: Segment | None = None
        self._computing: list[tuple[Job, int, int]] = []  # prompt, tokens, attempt
        self._decoding = 0, 0  # decodes in the step with these, and the tokens that they attend to
        self._leaving: list[tuple[Job, Callable[[bool], None]]] = []  # at the end of the step
        self._claims: dict[Job, Callable[[], None]] = {}  # prompts that wait for memory here before they are computed
        self._version = 0
        self._idle = True

    @property
    def computing(self) -> bool:
        return not self._idle

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.coming)

    @property
    def queued_tokens(self) -> int:
        return sum([job.num_uncomputed for job in self.queue]) + sum([job.num_uncomputed for job in self.coming])

    @property
    def free_tokens(self) -> int:
        """KV memory for one more request, in tokens."""
        return self._kv_tokens - self.batch.promised_tokens

    def made(self) -> list[int]:
        """Tokens of each running request so far."""
        segment = self._segment
        steps = 0 if segment is None else segment.steps_until(self._loop.now - segment.begun) - 1
        return [job.decoded + steps for job in self.batch.running]

    def step_s(self) -> float:
        """Seconds of a decode step with one more request."""
        context, batch = self.batch.context, len(self.batch.running)
        return self.decode_s(batch + 1, context + (context // batch if batch else 0))

    def decode_s(self, batch: int, context: int) -> float:
        """Seconds of a decode step, as the node expects it."""
        return self.known_slowness * self.costs.decode_s(batch, context)

    # --- arrivals

    def expect(self, job: Job) -> None:
        """A prompt was placed here; `ready` follows when its prefix has arrived."""
        self.coming[job] = None
        self.queued_s += job.prefill_s
        self._events.changed(self)

    def found(self, job: Job, tokens: int, left_s: float) -> None:
        """`tokens` tokens of a queued prompt are here already; the rest takes `left_s`."""
        self.queued_s = max(0.0, self.queued_s + left_s - job.prefill_s)
        job.computed, job.prefill_s = tokens, left_s

    def ready(self, job: Job) -> None:
        if job in self.coming:
            del self.coming[job]
            self.arena.loaded(job, job.blocks)
            self.queue.append(job)
            self._wake()

    def promise(self, job: Job) -> None:
        """The job will decode here."""
        self.batch.promise(job)
        self._events.changed(self)

    def reserve(self, job: Job, granted: Callable[[], None]) -> None:
        """Call granted() once there is memory here for the KV of a prompt that another node computes: the next one in
        the queue's order gets it, and the others wait for it."""
        self._claims[job] = granted
        self._grant()

    def _grant(self) -> None:
        while self._claims:
            job = self._order.order(self._loop.now, list(self._claims))[0]
            if not self.batch.reserve(job):
                return
            self._claims.pop(job)()

    def release(self, job: Job) -> None:
        """The job does not decode here after all, or needed no second token."""
        self.batch.release(job)
        self._grant()

    def join(self, job: Job) -> None:
        """The job's KV has arrived; it is lost if the node is down."""
        if not self.down:
            self.batch.joining.append(job)
            self._wake()

    def give(self, job: Job, left: Callable[[bool], None]) -> None:
        """Take a running job out at the end of the step, for another node; then call left(True). left(False): it has
        ended or was preempted before."""
        self._leaving.append((job, left))
        self.disturb()

    def cancel(self, job: Job) -> None:
        """Another node of the job's attempt was lost; drop the job here."""
        if job in self.coming or job in self.queue:
            self.coming.pop(job, None)
            self.queue = [other for other in self.queue if other is not job]
            self.queued_s = max(0.0, self.queued_s - job.prefill_s)
        self._claims.pop(job, None)
        self.batch.cancel(job)
        self._events.changed(self)
        self._grant()

    def crash(self) -> None:
        """The node loses all its state."""
        self.coming.clear()
        self._claims.clear()
        self.batch.clear()
        self.queue, self.queued_s = [], 0.0
        self._version += 1
        self._segment, self._computing, self._leaving = None, [], []
        self._idle = self.down = True
        self._events.changed(self)

    # --- steps

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._loop.after(0.0, self._begin, self._version)  # other jobs may arrive at the same moment
        else:
            self.disturb()

    def disturb(self) -> None:
        """New work has arrived, or the length of steps has changed: end the segment with the present step."""
        segment = self._segment
        if segment is None:
            return
        steps = segment.steps_until(self._loop.now - segment.begun)
        if steps < segment.steps:
            segment.steps = steps
            self._version += 1
            self._loop.at(segment.begun + segment.seconds(steps), self._decoded, self._version)

    def _begin(self, version: int) -> None:
        if version != self._version:
            return
        now = self._loop.now
        if self._leaving:
            self._let_go()
        self.batch.admit(now)
        for job in self.batch.preempt(self.name, lambda holders: self._order.order(now, holders)):
            if job in self.queue:
                self._begun_in_vain(job)
            else:
                self._events.preempted(self, job)
        chunked = bool(self.queue) and self._chunk(now)
        if not chunked and (running := self.batch.running):
            slow = self._step_factor(now)
            base, slope = self.model.decode_line(len(running))
            steps = self.batch.steps()
            lacking, self._draft_s = self.batch.catching_up()
            if lacking:
                steps, base = min(steps, lacking), base + self._draft_s
            self._segment = Segment(now, steps, base * slow, slope * slow, len(running), self.batch.context)
            self._version += 1
            self._loop.at(now + self._segment.seconds(steps), self._decoded, self._version)
        elif not chunked:
            self._idle = True
        self._events.changed(self)

    def _begun_in_vain(self, job: Job) -> None:
        """A prompt has lost its memory: it waits, and computes all of its KV again."""
        self.found(job, 0, self.costs.prompt_s(job.goal, 0))
        job.prefix_tokens, job.source, job.begun = 0, "none", math.nan
        job.retries += 1
        job.preemptions += 1

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        for job, left in leaving:
            runs = job in self.batch.running
            if runs:
                self.batch.cancel(job)
            left(runs)

    def _chunk(self, now: float) -> bool:
        """Make a step with prompts; False if none of them has a seat."""
        queue = self._order.order(now, self.queue) if len(self.queue) > 1 else self.queue
        context, running = self.batch.context, len(self.batch.running)
        shares = self._share(now, queue, context)
        if not shares:
            return False
        for job, tokens in shares:
            self._order.served(job, tokens)
            self._computing.append((job, tokens, job.retries))
        chunks = [(tokens, job.computed) for job, tokens, _ in self._computing]
        if running and not self._policy.decodes_wait:
            self._decoding, self._draft_s = (running, context), self.batch.catching_up()[1]
            seconds = self.model.mixed_s(chunks, running, context) + self._draft_s
        else:
            self._decoding = 0, 0
            seconds = self.model.chunks_s(chunks)
        self._version += 1
        self._loop.after(seconds * self._step_factor(now), self._chunked, self._version, now)
        return True

    def _step_factor(self, now: float) -> float:
        """Of a step that begins now. The node fits its costs to steps without the slowness, because its records carry
        the slowness as a factor of their own from its detection on."""
        self._factor = self._slowness(now)
        return self._factor * self._noise.factor()

    def _share(self, now: float, queue: Sequence[Job], context: int) -> list[tuple[Job, int]]:
        """Divide the tokens of the next step among prompts; the batch attends to `context` tokens. A prompt that starts
        may find a longer prefix than when it was queued. One that gets no seat keeps those behind it from starting."""
        computing, shares = self.batch.computing, list[tuple[Job, int]]()
        left, full = 0, False
        for job in queue:
            if job not in computing and (full or not self.batch.seat(job)):
                full = True
                if len(shares) == len(computing):
                    break
                continue
            self._started(now, job)
            if not shares:
                beside = 0 if self._policy.decodes_wait else len(self.batch.running)
                left = max(1, self._chunk_tokens - beside)
                left = min(left, max(1, self._policy.prefill_tokens(self._load(now, left, beside, queue, context))))
            shares.append((job, min(job.num_uncomputed, left)))
            left -= shares[-1][1]
            if not left or len(shares) == self._prompts:
                break
        return shares

    def _load(self, now: float, left: int, beside: int, queue: Sequence[Job], context: int) -> StepLoad:
        if not beside:
            return StepLoad(left, beside, context, queue[0].computed)
        classes = {job.service_class for job in self.batch.running}
        prompts = [Waiting(job.service_class, now - job.arrival, job.num_uncomputed, job.computed) for job in queue]
        return StepLoad(left, beside, context, queue[0].computed, classes, prompts)

    def _started(self, now: float, job: Job) -> None:
        if math.isnan(job.begun):
            job.begun = now
            self._events.prefill_begun(self, job)

    def _chunked(self, version: int, begun: float) -> None:
        if version != self._version or not self._computing:
            return
        computed, self._computing = self._computing, []
        seconds = self._loop.now - begun
        self._stepped(seconds, 1)
        self.prompts_s += seconds
        chunks = [(tokens, job.computed) for job, tokens, attempt in computed if job.retries == attempt]
        if len(chunks) == len(computed):
            if self._decoding[0]:
                self.costs.both(chunks, *self._decoding, seconds / self._factor - self._draft_s)
            else:
                self.costs.computed(chunks, seconds / self._factor)
        if self._policy.decodes_wait:
            self.batch.held_s += seconds
        else:
            self.batch.caught_up(1)
            self._advance(1, seconds, begun, seconds)
        for job, tokens, attempt in computed:
            if job.retries == attempt:
                self._computed(job, tokens)
        self._begin(self._version)

    def _computed(self, job: Job, tokens: int) -> None:
        share = job.prefill_s * tokens / job.num_uncomputed if job.num_uncomputed else job.prefill_s
        job.computed += tokens
        self.queued_s = max(0.0, self.queued_s - share)
        job.prefill_s -= share
        size = self.arena.room.block_tokens
        if job.num_uncomputed:
            self.arena.name(job, job.blocks[: job.computed // size])
        else:
            self.arena.name(job, job.blocks[: job.goal // size] or job.blocks)
            self.queue.remove(job)
            if job.split or job.decode != self.name:
                self.batch.unseat(job)
                self._grant()
            if not job.split:
                self._answered(job)
            self._events.prefilled(self, job)

    def _answered(self, job: Job) -> None:
        """The job's first token."""
        job.prefilled, job.decoded = self._loop.now, 1
        if job.resumed:
            job.longest_gap = max(job.longest_gap, job.prefilled - job.broken)
            job.gaps.append((1, job.prefilled - job.broken))
        else:
            job.first_token = job.prefilled

    def _decoded(self, version: int) -> None:
        segment = self._segment
        if version != self._version or segment is None:
            return
        self._segment = None
        seconds = self._loop.now - segment.begun
        self._stepped(seconds, segment.steps)
        last = segment.seconds(segment.steps) - segment.seconds(segment.steps - 1)
        mean_context = segment.context + segment.batch * (segment.steps - 1) / 2
        self.costs.decoded(segment.batch, mean_context, seconds / segment.steps / self._factor - self._draft_s)
        self.batch.caught_up(segment.steps)
        self._advance(segment.steps, last, segment.begun, segment.seconds(1))
        self._begin(self._version)

    def _advance(self, steps: int, last_s: float, begun: float, first_s: float) -> None:
        for job in self.batch.advance(self._loop.now, steps, last_s, begun, first_s):
            self._events.finished(self, job)
        self._grant()

    def _stepped(self, seconds: float, steps: int) -> None:
        self.busy_s += seconds
        self.steps += steps

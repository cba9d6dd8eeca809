"""Long prompts on a group of prefill nodes, and short prompts: as a pipeline, with divided tokens, or on one.

The rules are those of the engine (docs/long-prompts.md). A node runs one step at a time: a chunk of the long prompt, or
short prompts together. If both could run, they take turns. A stage may be three chunks ahead of the next one. A chunk
of divided tokens begins when the chunk before it has computed its first layer, and then waits inside its step, layer by
layer, for what is not there yet: nothing else runs on that node meanwhile. Chunks are planned by production code
(sched/chunks.py, sched/stripes.py). The next long prompt begins when the one before has its first token. A short prompt
goes to the node that would begin it first. Every short prompt that came before the last long one had its token counts:
after that moment both kinds go on until each of these has its own. Decoding and the way of KV to decode nodes are not
simulated: they are the same for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from lab.simulator.models.loop import Loop
from lab.simulator.models.step_models import Geometry, StepModel
from sched.chunks import plan, stage_seconds
from sched.stripes import owner, stripe_sizes

ALIGN_TOKENS = 64
ELEMENT_BYTES = 2
MAX_UNREAD = 3
"""Of engine/step/part.py."""

WAYS = ("one node", "pipeline", "context")


@dataclass(frozen=True, slots=True)
class Beside:
    """Short prompts: their tokens, uniform between `least` and `most`; the share of all nodes' time that they take, or
    None: every node always has some. At most `limit` arrive."""

    load: float | None
    least: int = 500
    most: int = 1500
    limit: int = 1_000_000

    @property
    def mean(self) -> int:
        """Tokens of a short prompt, on average; of each in a queue."""
        return (self.least + self.most) // 2


@dataclass(slots=True)
class Part:
    """The next chunk of the long prompt on a node."""

    begin: float  # not before this time
    seconds: float  # in a step, from `now` on
    wait: float  # of it: for other nodes


class Division(Protocol):
    """How a group divides one prompt."""

    received_bytes: float  # by the node that receives most from the others

    def next(self, node: int, now: float) -> Part | None:
        """The chunk that this node could begin now or later; None: not before another node has ended something."""

    def begun(self, node: int, begin: float, end: float) -> None:
        """The node computes that chunk."""

    def ended(self, node: int, now: float) -> bool:
        """The node has computed it. Returns whether the prompt has its first token."""


class OneNode:
    """Node 0 computes all of it."""

    def __init__(self, model: StepModel, tokens: int) -> None:
        sizes = [min(model.chunk_tokens, tokens - at) for at in range(0, tokens, model.chunk_tokens)]
        self._seconds = deque(stage_seconds(sizes, 0, model.prefill, 1.0))
        self.received_bytes = 0.0

    def next(self, node: int, now: float) -> Part | None:
        return Part(now, self._seconds[0], 0.0) if node == 0 and self._seconds else None

    def begun(self, node: int, begin: float, end: float) -> None:
        self._seconds.popleft()

    def ended(self, node: int, now: float) -> bool:
        return not self._seconds


class PipelineOf:
    """Equal layers; hidden states go to the next stage behind each chunk."""

    def __init__(self, model: StepModel, shape: Geometry, tokens: int, nodes: int) -> None:
        sizes = plan(tokens, 0, nodes, model.prefill, model.chunk_tokens, ALIGN_TOKENS)
        token_bytes = shape.hidden * ELEMENT_BYTES
        self._seconds = stage_seconds(sizes, 0, model.prefill, 1 / nodes)
        self._hops = [model.nic_latency_s + size * token_bytes / model.nic_bytes_s for size in sizes]
        self._done: list[list[float]] = [[] for _ in range(nodes)]  # of each stage: when its chunks ended
        self.received_bytes = float(tokens * token_bytes)

    def next(self, node: int, now: float) -> Part | None:
        chunk = len(self._done[node])
        if chunk == len(self._seconds):
            return None
        if node + 1 < len(self._done) and chunk - len(self._done[node + 1]) >= MAX_UNREAD:
            return None
        if node and chunk >= len(self._done[node - 1]):
            return None
        begin = self._done[node - 1][chunk] + self._hops[chunk] if node else now
        return Part(begin, self._seconds[chunk], 0.0)

    def begun(self, node: int, begin: float, end: float) -> None:
        pass

    def ended(self, node: int, now: float) -> bool:
        self._done[node].append(now)
        return len(self._done[-1]) == len(self._seconds)


class ContextOf:
    """Divided tokens; the KV of every layer goes from its node to those with later chunks, over one NIC."""

    def __init__(self, model: StepModel, shape: Geometry, tokens: int, nodes: int) -> None:
        sizes = stripe_sizes(tokens, 0, nodes, shape.layers, model.prefill, model.chunk_tokens, ALIGN_TOKENS)
        self._nodes, self._layers, self._count = nodes, shape.layers, len(sizes)
        self._seconds = stage_seconds(sizes, 0, model.prefill, 1.0)
        owners = [owner(chunk, len(sizes), nodes) for chunk in range(len(sizes))]
        self._chunks = [deque(chunk for chunk in range(len(sizes)) if owners[chunk] == node) for node in range(nodes)]
        last = [max(chunks) for chunks in self._chunks]
        self._hops: list[float] = []  # of a chunk: until a layer of its KV is on all nodes that need it
        received = [0.0] * nodes
        for chunk, size in enumerate(sizes):
            needed = [node for node in range(nodes) if last[node] > chunk and node != owners[chunk]]
            nbytes = float(size * model.token_bytes)
            self._hops.append(model.nic_latency_s + len(needed) * nbytes / shape.layers / model.nic_bytes_s)
            for node in needed:
                received[node] += nbytes
        self._times: dict[int, tuple[float, float]] = {}  # chunk -> its begin and end
        self._ended = 0
        self.received_bytes = max(received)

    def next(self, node: int, now: float) -> Part | None:
        if not self._chunks[node]:
            return None
        chunk = self._chunks[node][0]
        whole_s = self._seconds[chunk]
        if not chunk:
            return Part(now, whole_s, 0.0)
        if chunk - 1 not in self._times:
            return None
        (begin, end), hop_s = self._times[chunk - 1], self._hops[chunk - 1]
        first = begin + self._seconds[chunk - 1] / self._layers + hop_s
        at, layer_s = max(now, first), whole_s / self._layers
        sent = first + (self._layers - 1) * hop_s  # the last layer, if the NIC is slower than the steps
        until = max(at + whole_s, end + hop_s + layer_s, sent + layer_s)
        return Part(first, until - at, until - at - whole_s)

    def begun(self, node: int, begin: float, end: float) -> None:
        self._times[self._chunks[node].popleft()] = (begin, end)

    def ended(self, node: int, now: float) -> bool:
        self._ended += 1
        return self._ended == self._count


@dataclass(slots=True)
class Short:
    """A short prompt."""

    arrival: float
    tokens: int


@dataclass(slots=True)
class GroupNode:
    """A node, its queue of short prompts, and its time."""

    index: int
    shorts: deque[Short] = field(default_factory=deque)
    until: float = 0.0  # the end of the running step
    part_ran: bool = False
    busy_s: float = 0.0  # in steps, without the next
    waited_s: float = 0.0  # inside steps, for other nodes
    queued_s: float = 0.0  # of shorts


class PrefillGroup:
    """`prompts` long prompts of `tokens` tokens, one after the other, on `nodes` nodes."""

    def __init__(self, model: StepModel, shape: Geometry, way: str, nodes: int, tokens: int, beside: Beside) -> None:
        """way: one of WAYS."""
        self.model, self.shape, self.way, self.tokens, self.beside = model, shape, way, tokens, beside
        self.nodes = [GroupNode(index) for index in range(nodes)]
        self.ttft_s: list[float] = []
        self.short_ttft_s: list[float] = []  # of shorts that arrived before the end
        self.arrived = 0  # shorts before the end
        self.left_open = 0  # of these, without their token at the end
        self.seconds = 0.0  # from the first long prompt to the first token of the last one, which is the end
        self.waiting = 0.0  # the share of the nodes' time until then that they wait inside steps for one another
        self.computing = 0.0  # the share of it in which they compute
        self._came = 0  # shorts, also after the end
        self._loop = Loop()
        self._division: Division | None = None
        self._begun = 0.0
        self._left = 0

    def play(self, prompts: int, seed: int) -> None:
        self._left, random = prompts, Random(seed)
        self._next_prompt()
        load = self.beside.load
        if load:
            mean_s = self._short_s([Short(0.0, self.beside.mean)])
            self._loop.at(0.0, self._arrive, random, load * len(self.nodes) / mean_s)
        elif load is None:
            for node in self.nodes:
                self._refill(node)
            self._wake_all()
        while self._left and self._loop.step():
            pass
        self._end()
        if load is not None:
            while len(self.short_ttft_s) < self.arrived and self._loop.step():
                pass

    def _end(self) -> None:
        self.seconds, self.left_open = self._loop.now, self.arrived - len(self.short_ttft_s)
        later_s = sum(max(0.0, node.until - self.seconds) for node in self.nodes)  # of steps that still run
        whole_s = len(self.nodes) * self.seconds
        self.waiting = sum(node.waited_s for node in self.nodes) / whole_s
        self.computing = (sum(node.busy_s for node in self.nodes) - later_s) / whole_s

    @property
    def open_share(self) -> float:
        """The shorts that had no token at the end, over all that had arrived. Where it is not small, the queue grows,
        and its times are those of the length of the run."""
        return self.left_open / self.arrived if self.arrived else 0.0

    @property
    def received_bytes(self) -> float:
        """Of one long prompt, by the node that receives most."""
        return self._divided().received_bytes

    def _divided(self) -> Division:
        nodes = len(self.nodes)
        if self.way == "one node" or nodes == 1:
            return OneNode(self.model, self.tokens)
        kind = PipelineOf if self.way == "pipeline" else ContextOf
        return kind(self.model, self.shape, self.tokens, nodes)

    # --- arrivals

    def _next_prompt(self) -> None:
        self._division, self._begun = self._divided(), self._loop.now
        self._wake_all()

    def _arrive(self, random: Random, rate: float) -> None:
        if self._came >= self.beside.limit:
            return
        self._came += 1
        self.arrived += self._left > 0
        short = Short(self._loop.now, random.randint(self.beside.least, self.beside.most))
        node = min(self.nodes, key=lambda one: max(one.until - self._loop.now, 0.0) + one.queued_s)
        node.queued_s += self._short_s([short])
        node.shorts.append(short)
        self._loop.at(self._loop.now, self._look, node)
        self._loop.after(random.expovariate(rate), self._arrive, random, rate)

    def _refill(self, node: GroupNode) -> None:
        """As many as fit into a step are there at once."""
        mean = self.beside.mean
        while self.beside.load is None and len(node.shorts) * mean < self.model.chunk_tokens:
            node.shorts.append(Short(self._loop.now, mean))

    # --- steps

    def _wake_all(self) -> None:
        for node in self.nodes:
            self._loop.at(self._loop.now, self._look, node)

    def _look(self, node: GroupNode) -> None:
        now = self._loop.now
        if node.until > now or self._division is None:
            return
        part = self._division.next(node.index, now)
        ready = part is not None and part.begin <= now
        if part is not None and ready and not (node.part_ran and node.shorts):
            node.until, node.part_ran = now + part.seconds, True
            node.waited_s += part.wait
            node.busy_s += part.seconds - part.wait
            self._division.begun(node.index, now, node.until)
            self._loop.at(node.until, self._part_ended, node)
            self._wake_all()  # another node may begin the chunk behind it
            return
        if part is not None and not ready:
            self._loop.at(part.begin, self._look, node)
        if node.shorts:
            taken = self._batch(node)
            seconds = self._short_s(taken)
            node.until, node.part_ran = now + seconds, False
            node.busy_s += seconds
            self._loop.at(node.until, self._shorts_ended, node, taken)

    def _batch(self, node: GroupNode) -> Sequence[Short]:
        taken, room = [node.shorts.popleft()], self.model.chunk_tokens
        room -= taken[0].tokens
        while node.shorts and node.shorts[0].tokens <= room:
            room -= node.shorts[0].tokens
            taken.append(node.shorts.popleft())
        node.queued_s = sum(self._short_s([short]) for short in node.shorts)
        self._refill(node)
        return taken

    def _short_s(self, shorts: Sequence[Short]) -> float:
        return self.model.chunks_s([(short.tokens, 0) for short in shorts])

    def _shorts_ended(self, node: GroupNode, taken: Sequence[Short]) -> None:
        now = self._loop.now
        self.short_ttft_s += [now - short.arrival for short in taken if self._left or short.arrival <= self.seconds]
        self._look(node)

    def _part_ended(self, node: GroupNode) -> None:
        assert self._division is not None
        if self._division.ended(node.index, self._loop.now):
            if self._left:
                self.ttft_s.append(self._loop.now - self._begun)
                self._left -= 1
            self._next_prompt()
        else:
            self._wake_all()

"""Groups that want the same small arenas: whatever holds what, none waits for another for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pool.block_pool import OutOfBlocks
from engine.core.batcher import Batcher
from engine.step.part import MAX_UNREAD, Part, Stage, Stripes
from engine.step.request import Request, RequestState
from engine.step.step import ScheduledRow, Step
from tests.engine.toy_model import batcher, next_token, request, run_dry

SIZE = 4
LAYERS = 4
KNOWN = 16  # tokens that some nodes have computed before
MAX_FAILED = 2  # as MAX_FAILED_APART in engine/front/groups.py: after that, one node does all of the prompt


@dataclass
class Prompt:
    """A prompt of the cluster, on a group of nodes: as a pipeline, or with its tokens divided. Or the first of them
    computes it for a decode node."""

    name: str
    nodes: list[int]
    tokens: int
    group: bool
    pipeline: bool
    decode: int | None  # the node that reserves blocks for it, if it is one of these
    known: list[int]  # nodes that have computed its first tokens before
    service_class: str = "standard"
    failed: int = 0
    parts: dict[int, Request] = field(default_factory=dict)
    claim: Request | None = None
    begun: set[int] = field(default_factory=set)  # first tokens of chunks
    prefix: int = 0  # tokens that all its nodes know
    computed: int = 0  # leading tokens with all layers, if the tokens are divided
    done: bool = False

    @property
    def attempt(self) -> str:
        return f"{self.name}#{self.failed}"

    @property
    def apart(self) -> bool:
        """Whether several nodes do it."""
        return self.failed < MAX_FAILED and (self.group or self.decode is not None)

    @property
    def grouped(self) -> bool:
        return self.apart and self.group


class Cluster:
    """Nodes with their own batchers; messages take no time, a step one round."""

    def __init__(self, arenas: list[int], prompts: list[Prompt], chunk: int) -> None:
        self.nodes: list[Batcher] = [batcher(blocks, SIZE, seqs=2, budget=4 * chunk) for blocks in arenas]
        self.steps: list[Step | None] = [None] * len(arenas)
        self.prompts, self.chunk, self.now, self.deaths = prompts, chunk, 0.0, 0
        self.random = Random(0)
        for prompt in prompts:
            for node in prompt.known:
                self.nodes[node].add(0, request("before", self.ids(prompt)[: KNOWN + 1], max_tokens=1))
                run_dry(self.nodes[node])
        for prompt in prompts:
            self.place(prompt)

    def ids(self, prompt: Prompt) -> list[int]:
        """No prompt begins as another."""
        return [1000 * (1 + int(prompt.name[1:])) + token for token in range(prompt.tokens)]

    def arrival(self, prompt: Prompt) -> float:
        """No two of a node's requests arrive at the same time: their order would depend on who asks for it."""
        return self.now + self.prompts.index(prompt) / 100

    def place(self, prompt: Prompt) -> None:
        """Blocks on its decode node come first."""
        prompt.parts, prompt.begun, prompt.computed, prompt.claim = {}, set(), 0, None
        if prompt.decode is not None and prompt.apart:
            prompt.claim = request(prompt.attempt, self.ids(prompt), arrival=self.arrival(prompt))
            prompt.claim.service_class = prompt.service_class
            self.nodes[prompt.decode].claim(prompt.claim)
        else:
            self.start(prompt)

    def reserve(self, prompt: Prompt) -> bool:
        b, claim = self.nodes[prompt.decode], prompt.claim
        if b.claims(self.now)[0] is not claim:
            return False
        try:
            b.reserve(self.now, claim)
        except OutOfBlocks:
            return False
        b.unclaim(claim)
        prompt.claim = None
        self.start(prompt)
        return True

    def start(self, prompt: Prompt) -> None:
        whole = self.ids(prompt)
        alone = [prompt.nodes[0] if prompt.apart or prompt.decode is None else prompt.decode]
        for index, node in enumerate(prompt.nodes if prompt.grouped else alone):
            r = request(prompt.attempt, whole, arrival=self.arrival(prompt), max_tokens=1)
            r.service_class = prompt.service_class
            r.handover = prompt.apart
            r.holds_elsewhere = prompt.apart and not prompt.group
            if prompt.grouped:
                r.part = self.part(prompt, index)
            prompt.parts[node] = r
            self.nodes[node].add(self.now, r)

    def part(self, prompt: Prompt, index: int) -> Part:
        nodes = len(prompt.nodes)
        if prompt.pipeline:
            borders = [LAYERS * i // nodes for i in range(nodes + 1)]
            return Stage(borders[index], borders[index + 1], LAYERS, 1000)
        return Stripes(0, LAYERS, LAYERS, 1000, index=index, nodes=nodes)

    # --- one round

    def round(self, order: list[int]) -> bool:
        """Whether anything happened."""
        self.now += 1
        happened = False
        for prompt in self.prompts:
            happened |= self.begin(prompt)
        for node in order:
            happened |= self.run(node)
        return happened

    def begin(self, prompt: Prompt) -> bool:
        """The decode node has blocks for it, then all nodes agree; chunks of divided tokens begin in order."""
        if prompt.claim is not None:
            return self.reserve(prompt)
        if prompt.done or not prompt.grouped:
            return False
        parts = list(prompt.parts.values())
        if not any(r.part.begun for r in parts):
            if not all(r.looked_up and r.state is RequestState.WAITING for r in parts):
                return False
            prompt.prefix = prompt.computed = min(r.num_computed for r in parts)
            left = prompt.tokens - prompt.prefix
            sizes = [self.chunk] * (left // self.chunk) + ([left % self.chunk] if left % self.chunk else [])
            for node, r in list(prompt.parts.items())[: 1 if prompt.pipeline else None]:
                self.nodes[node].begin_part(r, prompt.prefix, sizes)
            return True
        happened = False
        for node, r in [] if prompt.pipeline else prompt.parts.items():
            begin = r.part.next_begin(r.num_computed) if not r.finished else None
            ready = begin is not None and all(b in prompt.begun for b in r.part.borders[:-1] if b < begin)
            if ready and r.part.room(r.num_computed) == 0 and not self.nodes[node].in_step(r):
                self.nodes[node].skip_to(r, begin)
                happened = True
        return happened

    def run(self, node: int) -> bool:
        """End the running step, if nothing keeps it, then begin the next one."""
        b, step = self.nodes[node], self.steps[node]
        if step is not None:
            parts = [row for row in step.rows if row.request.part is not None]
            waits = any(self.waits(row.request, row.start) for row in parts)
            if parts and not self.cut(node, parts[0], waits) and waits:
                return False
            self.commit(node, step)
        for r in b.loads(self.now, 4):
            b.blocks.adopt_prefix(r)
            b.loaded(self.now, r)
        self.steps[node] = following = b.schedule(self.now)
        lost = b.stuck()
        for r, reason in lost:
            assert reason
            self.fail(r.request_id)
        for row in following.rows if following is not None else ():
            prompt = self.of(row.request)
            if prompt is not None and isinstance(row.request.part, Stripes):
                prompt.begun.add(row.start)
        b.check_integrity()
        return step is not None or following is not None or bool(lost)

    def __repr__(self) -> str:
        lines = [repr(prompt) for prompt in self.prompts if not prompt.done]
        for node, b in enumerate(self.nodes):
            held = [(r.request_id, r.state.value, len(r.block_ids), r.num_ready) for r in b.requests.values()]
            claims = [r.request_id for r in b.claims(self.now)]
            lines.append(f"node {node}: {b.pool.num_free} of {b.pool.num_blocks} free, {held}, claims {claims}")
        return "\n".join(lines)

    def of(self, r: Request) -> Prompt | None:
        found = next((prompt for prompt in self.prompts if prompt.attempt == r.request_id), None)
        return found if found is not None and r in found.parts.values() else None

    def waits(self, r: Request, start: int) -> bool:
        """Inside its step, a chunk waits for the KV of all chunks before it."""
        prompt = self.of(r)
        return isinstance(r.part, Stripes) and prompt is not None and prompt.computed < start

    def cut(self, node: int, row: ScheduledRow, waits: bool) -> bool:
        """The part of a step ends between two layers, because other prompts have come: where it waits, or anywhere
        behind its first layer."""
        lets_in = self.nodes[node].lets_in_at() <= self.now if waits else self.random.random() < 0.3
        borders = list(row.layers)[0 if waits else 1 :]
        if lets_in and borders:
            row.stay(self.random.choice(borders))
        return not row.ends

    def commit(self, node: int, step: Step) -> None:
        sampled = [(next_token(row.request.token_ids),) if row.samples else None for row in step.rows]
        self.nodes[node].commit(self.now, step, sampled)
        for row in step.rows:
            prompt = self.of(row.request)
            if prompt is None or not row.ends:
                continue
            done = row.start + row.num_tokens
            if isinstance(row.request.part, Stage):
                self.pass_on(prompt, prompt.nodes.index(node), row.request.part, row.num_tokens, done)
            prompt.computed = max(prompt.computed, done)
            if row.samples:
                prompt.done = True
                if prompt.decode is not None and prompt.apart:
                    self.nodes[prompt.decode].abort(self.now, prompt.attempt)

    def pass_on(self, prompt: Prompt, index: int, part: Stage, count: int, done: int) -> None:
        if index:
            before = prompt.parts[prompt.nodes[index - 1]].part
            before.unread = max(0.0, before.unread - before.ahead(count))
        if not part.last:
            part.unread += part.ahead(count)
            assert part.unread <= MAX_UNREAD + 1
            following = prompt.parts[prompt.nodes[index + 1]]
            if not following.part.begun:
                self.nodes[prompt.nodes[index + 1]].begin_part(following, prompt.prefix)
            following.part.arrived(count)

    def fail(self, attempt: str) -> None:
        """A node ends the attempt: all nodes give everything back, and it is placed again."""
        (prompt,) = [one for one in self.prompts if one.attempt == attempt]
        self.deaths += 1
        for node in {*prompt.parts, *([] if prompt.decode is None else [prompt.decode])}:
            self.nodes[node].abort(self.now, attempt)
        prompt.failed += 1
        self.place(prompt)


@st.composite
def clusters(draw) -> Cluster:
    count = draw(st.integers(2, 3))
    chunk = draw(st.sampled_from([8, 12]))
    prompts = []
    for number in range(draw(st.integers(2, 5))):
        group = draw(st.booleans())
        nodes = draw(st.permutations(range(count)))[: draw(st.integers(2, count)) if group else 1]
        tokens = draw(st.integers(count * chunk + KNOWN, 56))
        kind = draw(st.sampled_from(["standard", "standard", "batch", "interactive"]))
        others = [node for node in range(count) if node not in nodes]
        prompts.append(
            Prompt(
                f"p{number}",
                nodes,
                tokens,
                group=group,
                pipeline=draw(st.booleans()),
                decode=draw(st.sampled_from([None, *others])),
                known=draw(st.lists(st.sampled_from(range(count)), unique=True)),
                service_class=kind,
                failed=draw(st.sampled_from([0, 0, MAX_FAILED])),
            )
        )
    arenas = [draw(st.integers(15, 30)) for _ in range(count)]  # at least the longest prompt with its answer
    return Cluster(arenas, prompts, chunk)


@settings(max_examples=300, deadline=None)
@given(clusters(), st.randoms(use_true_random=False))
def test_no_prompts_wait_in_a_circle(cluster, random):
    """Every round computes something or ends an attempt, until all prompts are computed; no attempt ends twice."""
    cluster.random = random
    for _ in range(2000):
        order = list(range(len(cluster.nodes)))
        random.shuffle(order)
        if not cluster.round(order) and not cluster.round(order):
            break
    assert all(prompt.done for prompt in cluster.prompts), f"they wait in a circle:\n{cluster!r}"
    assert cluster.deaths <= MAX_FAILED * len(cluster.prompts)
    for b in cluster.nodes:
        assert not b.requests and b.pool.usage()["held"] == 0

"""The number of requests that one core accepts, without a network. It covers token ids to the messages for the
prefill and the decode node.

The probed nodes answer immediately from memory, so this measures only the acceptor's work: keys, view, shortlist,
probes as messages, choice, packing.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from cache.block import BlockGeometry
from cache.results import LeadingRun
from engine.front.cluster import Cluster
from engine.front.placement_policy import COMPILED
from engine.front.placing import PlacementRules, Placer
from engine.handoff.messages import Intended, LoadNow, Probed, Rates, pack_request
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import encode
from net.channel.wire import Frame
from sched.admission import Limits
from sched.gossip.holders import Holders
from sched.gossip.record import RECORD, NodeRecord
from sched.membership.member import Member
from sched.placement.mooncake import MooncakePlacement
from sched.rejection import Predicted

GEOMETRY = BlockGeometry(num_layers=2, num_kv_heads=2, head_size=64, block_size=16, dtype="float32")
ROOT = bytes(16)
NOBODY_COMPUTES = encode(Intended({}))


class Answers:
    """The channel, gossip, store and load words of a cluster in one process."""

    def __init__(self, nodes: int, rng: random.Random) -> None:
        self.members = [Member(f"n{i}", ("127.0.0.1", i), roles=("prefill", "decode")) for i in range(nodes)]
        self.records = {member.node_id: _record(rng) for member in self.members}
        self.counters: Counter[str] = Counter()
        self.me, self.node_id = self.members[0], self.members[0].node_id
        self.view = SimpleNamespace(charge=lambda *_: None)
        mates = self.members[1:]  # gossip's list is also the same until a node joins or leaves
        self.core = SimpleNamespace(digests=SimpleNamespace(holders=Holders()), mates=lambda: mates)
        rows = np.frombuffer(b"".join(record.pack() for record in self.records.values()), RECORD)
        self.table = list(self.records), rows
        self.replies = {
            name: encode(Probed(LoadNow(record.pack(), 0, 0, 0.01, 0.01, 1.0, 0.0, ""), Rates(0.0, {}), 0))
            for name, record in self.records.items()
        }

    def ask(self, peer: str, kind: str, body: Any, data: Any = ()) -> asyncio.Future[Frame]:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        answer.set_result(Frame({"b": self.replies[peer]}, []))
        return answer

    async def call(self, peer: str, kind: str, body: Any, data: Any = (), timeout_s: float = 0.0) -> Any:
        return NOBODY_COMPUTES, memoryview(b"")

    def handle(self, kind: str, handler: Any) -> None:
        pass

    def on_down(self, callback: Any) -> None:
        pass

    def elsewhere(self, rng: Any) -> list[Member]:
        return []

    async def find(self, keys: Any, groups: Any = None) -> LeadingRun:
        return LeadingRun(0)

    async def reserve(self, peer: str, amount: int) -> Any:
        return SimpleNamespace(previous=0, amount=amount, one_sided=False)


def _record(rng: random.Random) -> NodeRecord:
    return NodeRecord(
        work_s=rng.random(), prefill_a0=1e-3, prefill_a1=1e-5, prefill_a2=1e-10, decode_step_s=0.01,
        blocks_total=10_000, age_s=0.1, version=1,
    )  # fmt: skip


class Acceptor:
    """An acceptor in a cluster of `nodes` nodes that all answer at once."""

    def __init__(self, nodes: int, prompt_tokens: int, seed: int) -> None:
        rng = random.Random(seed)
        world = cast(Any, Answers(nodes, rng))
        policy = MooncakePlacement(Limits(), rng, compiled=COMPILED)
        rules = PlacementRules(policy, Predicted(), max_waiting=256, prefix_caching=True, intents=True)
        self._placer = Placer(rules, Cluster(world, world, world, world, world), GEOMETRY, rng)
        self._prompts = [[rng.randrange(50_000) for _ in range(prompt_tokens)] for _ in range(16)]
        self._sampling = SamplingParams(max_tokens=64)
        self._count = 0
        self.rates: list[float] = []

    def round(self, seconds: float) -> None:
        """Accept requests for `seconds`, one after the other; the rate counts, in requests per second."""
        self.rates.append(asyncio.run(self._accept(seconds)))

    async def _accept(self, seconds: float) -> float:
        first, begun = self._count, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            tokens = self._prompts[self._count % len(self._prompts)]
            request = Request(str(self._count), tokens, len(tokens), self._sampling, 0.0, ROOT, service_class="batch")
            (await self._placer.place(request)).kept()
            encode(pack_request(request)[0])
            self._count += 1
        return (self._count - first) / (time.perf_counter() - begun)


def race(acceptors: Sequence[Acceptor], rounds: int, seconds: float) -> None:
    """`rounds` turns of `seconds` of every acceptor, after one turn that does not count. They take turns, so that a
    slow phase of the machine meets all of them. The garbage collector runs as in a node, but it does not visit what the
    benchmark itself keeps."""
    gc.collect()
    gc.freeze()
    for acceptor in acceptors:
        acceptor.round(seconds)
        acceptor.rates.clear()
    for _ in range(rounds):
        for acceptor in acceptors:
            acceptor.round(seconds)
    gc.unfreeze()

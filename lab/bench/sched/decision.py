"""The time of one placement with given hashes. It matches the digests, scores all nodes, draws a shortlist, then
decides on the answers of the asked nodes.

All policies in clusters of all sizes take turns of a few hundred decisions (`race`). A figure is the median over the
turns of a quantile within one turn, so that a slow phase of the machine changes no figure and favours no policy. Times
of parts do not add up to the whole: the median of a sum exceeds the sum of the medians where the parts have long tails.

The cluster is synthetic: loads and speeds are drawn, a third of the nodes hold the start of the prompt and a few hold
more, as when a prefix has spread.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from engine.front.placement_policy import COMPILED
from lab.bench.common.rank import quantile
from lab.bench.common.timing import timed
from sched.admission import Limits
from sched.cost import TransferModel
from sched.gossip.digest import CuckooDigest, assemble, key64
from sched.gossip.holders import Holders
from sched.placement.choice import PlacementPolicy
from sched.placement.demand import Demand
from sched.placement.links import UniformLinks, Vector
from sched.placement.match import Matcher
from sched.placement.mooncake import MooncakePlacement
from sched.placement.table import placements
from sched.placement.view import Candidate, View

PROMPT_TOKENS, BLOCK_SIZE, TOKEN_BYTES = 12_000, 16, 320 << 10
KEYS_PER_NODE = 1_000
PROMPTS, CHANGING = 8, 16
CHANGE_EVERY = 8  # decisions
EXPECTED_ARRIVALS = 8.0
WARM_UP = 10  # decisions at the beginning of each turn: code and data come back into the caches
PARTS = ("match", "shortlist", "choose", "decision")
ROLES = (("prefill",), ("decode",), ("prefill", "decode"))


class Cluster:
    """`nodes` nodes as one acceptor sees them."""

    def __init__(self, nodes: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rng = rng
        self.candidates = [_candidate(f"node-{i:05d}", rng) for i in range(nodes)]
        self.links = UniformLinks(TransferModel(1e-3, 10e9), TransferModel(1e-3, 10e9))
        self.view = View(0.0, self.candidates, self.links, 256, EXPECTED_ARRIVALS)
        self._all = View(1.0, self.candidates, self.links, 256)
        common = [rng.randbytes(16) for _ in range(PROMPT_TOKENS // BLOCK_SIZE // 2)]
        self.prompts = [[*common, *(rng.randbytes(16) for _ in common)] for _ in range(PROMPTS)]
        self.holders = Holders()
        self.matcher = Matcher(lambda: self.holders)
        self._changing: list[tuple[str, CuckooDigest]] = []
        for node in self.candidates:
            self._fill(node.node_id)
        self.places = np.arange(nodes)

    def _fill(self, node_id: str) -> None:
        """Gives the node a digest with the leading keys that it holds; other keys only fill its table."""
        digest = CuckooDigest(epoch=1, expected_keys=KEYS_PER_NODE)
        draw, keys = self.rng.random(), self.rng.choice(self.prompts)
        depth = 0 if draw < 0.66 else len(keys) // 2 if draw < 0.95 else self.rng.randrange(len(keys))
        for key in keys[:depth]:
            digest.add(key64(key))
        while digest.take_delta() is not None:
            pass
        loaded = assemble(digest.pages())
        assert loaded is not None
        self.holders.admit(node_id)
        self.holders.load(node_id, *loaded)
        if not depth and len(self._changing) < CHANGING:
            self._changing.append((node_id, digest))

    def change(self) -> None:
        """A node stores or drops the end of a prompt, so that cached answers become wrong."""
        node_id, digest = self.rng.choice(self._changing)
        for key in self.rng.choice(self.prompts)[-64:]:
            (digest.discard if key64(key) in digest else digest.add)(key64(key))
        while (delta := digest.take_delta()) is not None:
            self.holders.apply(node_id, delta)

    def answers(self, asked: Sequence[int], matched: Vector) -> tuple[View, Vector]:
        """A new view of the asked nodes, as after their answers, and their entries of `matched`."""
        if len(asked) == len(self.candidates):
            return self._all.at(self._all.table.copy(), self.links), matched
        return View(1.0, [self.candidates[i] for i in asked], self.links, 256), matched[np.asarray(asked)]


def demand_of(drawn: int, pool_tokens: int = 0) -> Demand:
    """A shortlist is made before the pool has answered (engine/front/placing.py), the choice afterwards."""
    return Demand(
        num_tokens=PROMPT_TOKENS - drawn,
        max_tokens=256,
        pool_tokens=pool_tokens,
        block_size=BLOCK_SIZE,
        handover_token_bytes=TOKEN_BYTES,
        fetch_token_bytes=TOKEN_BYTES,
    )


def _candidate(name: str, rng: random.Random) -> Candidate:
    speed = rng.uniform(0.8, 1.2)
    return Candidate(
        node_id=name,
        roles=rng.choice(ROLES),
        wait_s=rng.expovariate(0.5),
        waiting=rng.randrange(8),
        running=rng.randrange(32),
        prefill=(5e-3 * speed, 1e-4 * speed, 1e-9 * speed),
        free_blocks=rng.randrange(500, 20_000),
        total_blocks=20_000,
        step_s=rng.uniform(0.01, 0.05),
    )


class Contender:
    """One policy on one cluster. Contenders of one seed get the same demands and prompts in the same order."""

    def __init__(self, cluster: Cluster, policy: str, seed: int) -> None:
        self._cluster, self._rng = cluster, random.Random(seed)
        kind, rng = placements[policy], random.Random(seed)
        self._policy: PlacementPolicy = (
            kind(Limits(), rng, compiled=COMPILED) if issubclass(kind, MooncakePlacement) else kind(Limits(), rng)
        )
        self._number = 0
        self.rounds: dict[str, list[list[float]]] = {part: [] for part in PARTS}

    def round(self, decisions: int) -> None:
        """Time each part of `decisions` decisions, after WARM_UP decisions that do not count."""
        for part in PARTS:
            self.rounds[part].append([])
        for number in range(WARM_UP + decisions):
            seconds = self._decide()
            for part, found in zip(PARTS, seconds if number >= WARM_UP else (), strict=False):
                self.rounds[part][-1].append(found)

    def quantile_s(self, part: str, share: float) -> float:
        """The median over the rounds of each round's quantile."""
        return median(quantile(found, share) for found in self.rounds[part])

    @property
    def samples(self) -> int:
        """Decisions of one round, of which a quantile is taken."""
        return min(len(found) for found in self.rounds["decision"])

    def _decide(self) -> tuple[float, float, float, float]:
        cluster, policy = self._cluster, self._policy
        drawn = self._rng.randrange(BLOCK_SIZE)
        demand, pooled = demand_of(drawn), demand_of(drawn, PROMPT_TOKENS // 2)
        keys, now = self._rng.choice(cluster.prompts), 1e-5 * self._number
        if self._number % CHANGE_EVERY == 0:
            cluster.change()
        self._number += 1
        begun = time.perf_counter()
        depths = cluster.matcher.depths(keys, BLOCK_SIZE, cluster.places)
        matched = cluster.view.none if depths is None else depths
        at_match = time.perf_counter()
        asked = policy.shortlist(now, demand, cluster.view, matched)
        at_list = time.perf_counter()
        answered, known = cluster.answers(asked, matched) if len(asked) else (cluster.view, matched)
        begun_choice = time.perf_counter()
        policy.place(now, pooled, answered, known)
        ended = time.perf_counter()
        listing, choosing = at_list - begun, ended - begun_choice
        return at_match - begun, at_list - at_match, choosing, listing + choosing


def race(contenders: Sequence[Contender], rounds: int, decisions: int) -> None:
    """`rounds` rounds of `decisions` decisions of every contender. The contenders take turns, in another order in each
    round, so that a slow phase of the machine meets all of them. The garbage collector runs between the turns only."""
    order = list(contenders)
    gc.collect()
    gc.freeze()  # the clusters: a collection between two turns does not visit them
    gc.disable()
    try:
        for number in range(rounds):
            random.Random(number).shuffle(order)
            for contender in order:
                gc.collect()
                contender.round(decisions)
    finally:
        gc.enable()
        gc.unfreeze()


def floor_s(nodes: int, repeats: int = 2000) -> float:
    """One pass of numpy over a column of all nodes, and its minimum: the floor of a decision that considers all
    nodes."""
    first, second, out = np.random.default_rng(0).random((3, nodes))

    def once() -> None:
        np.add(first, second, out=out)
        out.argmin()

    return quantile(timed(once, repeats), 0.5)

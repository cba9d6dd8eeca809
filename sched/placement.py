"""Where a request is prefilled and decoded: Algorithm 1 of the Mooncake paper, and its rivals.

For every prefill node: TTFT = queue + prefix transfer + prefill of what is left. If the pooled store holds a prefix
more than `kvcache_balancing_threshold` times as long as the node's own, the node may fetch the difference instead of
computing it; the cheaper of both counts. The node with the least TTFT prefills. Fetching copies hot prefixes to where
they are asked for: this is the whole replication mechanism.

The decode node is the one with room for the request's KV that finishes it soonest, hand-over of the KV included; the
prefill node itself needs no hand-over.

In the paper the pool is the DRAM of the prefill nodes and the longest match names one of them; here it is the pooled
store, so the longest match elsewhere is `Demand.pool_tokens`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sched.admission import Limits, retry_after_s
from sched.cost import TransferModel, prefill_seconds
from sched.member import Member, Rng
from sched.state import NodeRecord

MAX_OUTPUT_TOKENS = 256
"""Output counted in decode estimates at most: max_tokens is a bound, not a forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs."""

    num_tokens: int  # of the prompt
    max_tokens: int  # of the output
    pool_tokens: int  # leading tokens whose blocks the pooled store holds
    block_size: int  # tokens
    token_bytes: int  # KV bytes per token

    @property
    def usable_tokens(self) -> int:
        """Longest prefix worth having: whole blocks, and at least one token is left to compute."""
        return (self.num_tokens - 1) // self.block_size * self.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks at the end of the expected output."""
        return -(-(self.num_tokens + self.output_tokens) // self.block_size)

    @property
    def output_tokens(self) -> int:
        return min(self.max_tokens, MAX_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as the acceptor knows it: its record as of now, and what is known of its cache."""

    node_id: str
    roles: tuple[str, ...]
    wait_s: float = 0.0  # until prefill work accepted so far is done
    waiting: int = 0  # queued requests
    running: int = 0
    local_tokens: int = 0  # leading prompt tokens cached on the node itself
    prefill: tuple[float, float, float]  # coefficients of its PrefillModel
    free_blocks: int = 0
    total_blocks: int = 0
    step_s: float = 0.0  # decode step if one more request joined

    @classmethod
    def of(cls, member: Member, record: NodeRecord, local_tokens: int = 0) -> Candidate:
        """`record` as of now, see ClusterView.records."""
        return cls(
            node_id=member.node_id,
            roles=member.roles,
            wait_s=record.work_s,
            waiting=record.waiting,
            running=record.running,
            local_tokens=local_tokens,
            prefill=record.prefill,
            free_blocks=record.free_blocks,
            total_blocks=record.blocks_total,
            step_s=record.decode_step_s,
        )


class Links(Protocol):
    """Predicted transfer times."""

    def fetch_s(self, node_id: str, nbytes: int) -> float:
        """From the pooled store into this node."""

    def handover_s(self, source: str, target: str, nbytes: int) -> float:
        """KV from prefill to decode node; never asked for source == target."""


@dataclass(frozen=True, slots=True)
class UniformLinks:
    """All paths alike, as this node measured its own."""

    fetch: TransferModel
    handover: TransferModel

    def fetch_s(self, node_id: str, nbytes: int) -> float:
        return self.fetch.estimate(nbytes)

    def handover_s(self, source: str, target: str, nbytes: int) -> float:
        return self.handover.estimate(nbytes)


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision and everything it was based on, so that it can be explained and later compared with the truth."""

    prefill: str
    decode: str
    prefix_source: str  # "local", "pool" or "none"
    prefix_tokens: int  # tokens not computed
    estimates: dict[str, float]  # wait_s, transfer_s, prefill_s, ttft_s, handover_s, step_s
    considered: list[dict[str, Any]] = field(default_factory=list)  # one dict per candidate and stage


@dataclass(frozen=True, slots=True)
class Rejected:
    """No placement. `retry_after_s` is None when waiting does not help (a role is missing, the prompt never fits)."""

    reason: str
    retry_after_s: float | None
    considered: list[dict[str, Any]] = field(default_factory=list)


Row = dict[str, Any]
"""One candidate at one stage, JSON-ready: stage, node, its estimates, and `skipped` with the reason if it cannot."""


class PlacementPolicy(Protocol):
    """Chooses among `candidates`, the alive nodes; depends on nothing but the arguments and the policy's rng."""

    def place(self, demand: Demand, candidates: Sequence[Candidate], links: Links) -> Placement | Rejected: ...


class TwoStages(ABC):
    """Prefill node first, then a decode node for it; a rival is these two choices.

    `kvcache_balancing_threshold`: how many times longer than the node's own prefix the pool's must be before a fetch
    is considered; 1 = whenever it is longer, infinity = only on nodes without any.
    """

    def __init__(self, limits: Limits, rng: Rng, kvcache_balancing_threshold: float = 1.5) -> None:
        if not kvcache_balancing_threshold >= 1:
            raise ValueError(f"kvcache_balancing_threshold must be at least 1, got {kvcache_balancing_threshold}")
        self._limits, self._rng, self._threshold = limits, rng, kvcache_balancing_threshold

    @abstractmethod
    def choose_prefill(self, rows: Sequence[Row]) -> Row:
        """One of `rows`, the prefill nodes that can take the request; never empty."""

    @abstractmethod
    def choose_decode(self, rows: Sequence[Row]) -> Row:
        """One of `rows`, the decode nodes that can take it; never empty."""

    def place(self, demand: Demand, candidates: Sequence[Candidate], links: Links) -> Placement | Rejected:
        if (missing := _missing_role(candidates)) is not None:
            return Rejected(f"no node with the role {missing} is alive", None)
        considered = [self._prefill_row(demand, c, links) for c in candidates if "prefill" in c.roles]
        able = [row for row in considered if not row["skipped"]]
        if not able:
            return _rejected("prefill", considered)
        prefill = self.choose_prefill(able)
        rows = [self._decode_row(demand, c, links, prefill) for c in candidates if "decode" in c.roles]
        considered += rows
        able = [row for row in rows if not row["skipped"]]
        if not able:
            return _rejected("decode", considered)
        decode = self.choose_decode(able)
        if (miss := self._limits.missed(prefill["ttft_s"], decode["step_s"])) is not None:
            return Rejected(miss, retry_after_s([(prefill["waiting"], prefill["wait_s"])]), considered)
        return Placement(
            prefill=prefill["node"],
            decode=decode["node"],
            prefix_source=prefill["prefix_source"],
            prefix_tokens=prefill["prefix_tokens"],
            estimates={name: prefill[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")}
            | {name: decode[name] for name in ("handover_s", "step_s")},
            considered=considered,
        )

    def _prefill_row(self, demand: Demand, node: Candidate, links: Links) -> Row:
        """TTFT on `node`, with the prefix that makes it least."""
        local = min(node.local_tokens, demand.usable_tokens) // demand.block_size * demand.block_size
        pooled = min(demand.pool_tokens, demand.usable_tokens) // demand.block_size * demand.block_size
        source, prefix, transfer_s = "local" if local else "none", local, 0.0
        prefill_s = prefill_seconds(node.prefill, demand.num_tokens - local, local)
        if pooled > (local * self._threshold if local else 0):
            fetch_s = links.fetch_s(node.node_id, (pooled - local) * demand.token_bytes)
            rest_s = prefill_seconds(node.prefill, demand.num_tokens - pooled, pooled)
            if fetch_s + rest_s < prefill_s:
                source, prefix, transfer_s, prefill_s = "pool", pooled, fetch_s, rest_s
        return {
            "stage": "prefill",
            "node": node.node_id,
            "skipped": self._obstacle(demand, node),
            "waiting": node.waiting,
            "wait_s": node.wait_s,
            "local_tokens": local,
            "pool_tokens": pooled,
            "prefix_source": source,
            "prefix_tokens": prefix,
            "transfer_s": transfer_s,
            "prefill_s": prefill_s,
            "ttft_s": node.wait_s + transfer_s + prefill_s,
        }

    def _decode_row(self, demand: Demand, node: Candidate, links: Links, prefill: Row) -> Row:
        """Time that `node` adds after the first token, and the blocks it would have left."""
        own = node.node_id == prefill["node"]
        nbytes = demand.num_tokens * demand.token_bytes
        handover_s = 0.0 if own else links.handover_s(prefill["node"], node.node_id, nbytes)
        return {
            "stage": "decode",
            "node": node.node_id,
            "skipped": self._obstacle(demand, node),
            "waiting": node.waiting,
            "wait_s": node.wait_s,
            "running": node.running,
            "headroom_blocks": node.free_blocks - demand.num_blocks,
            "handover_s": handover_s,
            "step_s": node.step_s,
            "decode_s": handover_s + demand.output_tokens * node.step_s,
        }

    def _obstacle(self, demand: Demand, node: Candidate) -> str:
        """Why the node cannot take the request, empty if it can."""
        if node.total_blocks * demand.block_size <= demand.num_tokens:
            return TOO_LONG
        return QUEUE_FULL if self._limits.full(node.waiting) else ""


class MooncakePlacement(TwoStages):
    """Algorithm 1."""

    def choose_prefill(self, rows: Sequence[Row]) -> Row:
        return self._least(rows, "ttft_s")

    def choose_decode(self, rows: Sequence[Row]) -> Row:
        """The soonest of those with room; without room anywhere the request will wait: where most blocks are free."""
        roomy = [row for row in rows if row["headroom_blocks"] >= 0]
        return self._least(roomy, "decode_s") if roomy else max(rows, key=lambda row: row["headroom_blocks"])

    def _least(self, rows: Sequence[Row], by: str) -> Row:
        """Equals are drawn, so that acceptors with equal views do not all choose the same node."""
        least = min(row[by] for row in rows)
        return self._rng.choice([row for row in rows if row[by] <= least])


class RandomPlacement(TwoStages):
    """Any node that can: the floor every policy must beat."""

    def choose_prefill(self, rows: Sequence[Row]) -> Row:
        return self._rng.choice(rows)

    def choose_decode(self, rows: Sequence[Row]) -> Row:
        return self._rng.choice(rows)


placements: dict[str, type[TwoStages]] = {"mooncake": MooncakePlacement, "random": RandomPlacement}
"""By the name on the command line; a rival is one class and one entry here."""

QUEUE_FULL = "queue full"
TOO_LONG = "prompt longer than its KV memory"


def _missing_role(candidates: Sequence[Candidate]) -> str | None:
    present = {role for candidate in candidates for role in candidate.roles}
    return next((role for role in ("prefill", "decode") if role not in present), None)


def _rejected(stage: str, considered: list[Row]) -> Rejected:
    """All nodes of `stage` were skipped: for good, or until a queue moves on."""
    full = [row for row in considered if row["stage"] == stage and row["skipped"] == QUEUE_FULL]
    if not full:
        return Rejected(f"the prompt is longer than the KV memory of every {stage} node", None, considered)
    wait = retry_after_s((row["waiting"], row["wait_s"]) for row in full)
    return Rejected(f"the queues of all {stage} nodes are full", wait, considered)

"""What nodes know of each other's load: the 64-byte record, and the view that keeps the newest one of each node.

Times in a record are relative: seconds left or passed when it was written. Whoever holds a record ages it by the own
steady clock from the moment of arrival, and passes it on aged, so no two clocks are ever compared; the error is the
time the record spent on the wire.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

RECORD = struct.Struct("<QIIHHH2xIIIffffffee")
"""NodeRecord's fields in order, little-endian; two bytes are free. Also readable as a numpy structured array."""

HEARTBEAT_S = 1.0
"""A record that did not change is published anew after this long, so that its age stays a sign of life."""

WORK_STEP_S = 0.05
FILL_STEP = 0.05
"""Moves of the queue (seconds) and of KV use (share of the blocks) that are worth a new version."""

Version = tuple[int, int]
"""(incarnation, version): the greater is the newer."""


def node_key(node_id: str) -> int:
    """64-bit name of a node in records and digests."""
    return int.from_bytes(blake2b(node_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """Load of one node. The owner fills in all but node, incarnation and version, which the view stamps."""

    node: int = 0  # node_key of its id
    incarnation: int = 0
    version: int = 0
    running: int = 0  # requests in its batch
    waiting: int = 0  # requests queued
    max_running: int = 0
    queued_tokens: int = 0  # prefill tokens not yet computed, of waiting and running requests
    blocks_used: int = 0  # KV blocks held by requests; cached ones nobody holds count as free
    blocks_total: int = 0
    age_s: float = 0.0  # since its owner wrote it
    work_s: float = 0.0  # time until the prefill work it has accepted is done
    prefill_a0: float = 0.0  # its PrefillModel: seconds,
    prefill_a1: float = 0.0  # seconds per token,
    prefill_a2: float = 0.0  # seconds per attended token pair (see sched.cost)
    decode_step_s: float = 0.0  # predicted decode step if one more request joined it
    dram_fill: float = 0.0  # share of its DRAM tier in use
    ssd_fill: float = 0.0

    @property
    def order(self) -> Version:
        return (self.incarnation, self.version)

    @property
    def prefill(self) -> tuple[float, float, float]:
        return (self.prefill_a0, self.prefill_a1, self.prefill_a2)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a long prompt's first tokens; 0 when nothing was measured yet."""
        return 1 / self.prefill_a1 if self.prefill_a1 > 0 else 0.0

    @property
    def free_blocks(self) -> int:
        return max(0, self.blocks_total - self.blocks_used)

    def aged(self, seconds: float) -> NodeRecord:
        """The record `seconds` later: its queue drains, its age grows."""
        return replace(self, work_s=max(0.0, self.work_s - seconds), age_s=self.age_s + seconds)

    def pack(self) -> bytes:
        """64 bytes; counters saturate, times are rounded to 32-bit floats, fills to 16-bit ones."""
        return RECORD.pack(
            self.node,
            self.incarnation,
            self.version,
            *(min(count, 0xFFFF) for count in (self.running, self.waiting, self.max_running)),
            *(min(count, 0xFFFFFFFF) for count in (self.queued_tokens, self.blocks_used, self.blocks_total)),
            *(self.age_s, self.work_s, self.prefill_a0, self.prefill_a1, self.prefill_a2, self.decode_step_s),
            *(self.dram_fill, self.ssd_fill),
        )

    @classmethod
    def unpack(cls, data: bytes) -> NodeRecord:
        """Raises ValueError for another length or a float that is negative or not finite."""
        if len(data) != RECORD.size:
            raise ValueError(f"a record has {RECORD.size} bytes, got {len(data)}")
        values = RECORD.unpack(data)
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("record with a field that is negative or not finite")
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))


@dataclass(slots=True)
class Held:
    """A record and when it came, by the holder's clock."""

    record: NodeRecord
    received_at: float
    charged_s: float = 0.0  # work sent there since, which the record cannot know yet
    charged_requests: int = 0

    def at(self, now: float) -> NodeRecord:
        """The record as of `now`, without charges: what is passed on."""
        return self.record.aged(max(0.0, now - self.received_at))


class ClusterView:
    """The newest record of each member. Records of nodes that were not admitted are turned away."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._own = node_key(node_id)
        self._names: dict[int, str] = {self._own: node_id}
        self._held: dict[int, Held] = {}

    # --- membership

    def admit(self, node_id: str) -> None:
        """Accept records of this node from now on."""
        self._names[node_key(node_id)] = node_id

    def forget(self, node_id: str) -> None:
        """The node is gone: drop its record and accept no other."""
        self._names.pop(node_key(node_id), None)
        self._held.pop(node_key(node_id), None)

    # --- reading

    def get(self, node_id: str, now: float) -> NodeRecord | None:
        """The node's load as of `now`, with the work charged to it here; None before its first record arrived."""
        held = self._held.get(node_key(node_id))
        if held is None:
            return None
        record = held.at(now)
        charged = max(0.0, held.record.work_s + held.charged_s - (now - held.received_at))
        return replace(record, work_s=charged, waiting=record.waiting + held.charged_requests)

    def records(self, now: float) -> dict[str, NodeRecord]:
        """`get` of every node that has a record, by node id."""
        found = {name: self.get(name, now) for key, name in self._names.items() if key in self._held}
        return {name: record for name, record in found.items() if record is not None}

    # --- writing

    def publish(self, now: float, incarnation: int, record: NodeRecord) -> None:
        """Take the own load. It becomes a new version when it differs from what others extrapolate, or as heartbeat."""
        held = self._held.get(self._own)
        version = held.record.version + 1 if held else 1
        fresh = replace(record, node=self._own, incarnation=incarnation, version=version, age_s=0.0)
        if held is None or held.record.incarnation != incarnation or _differs(held.at(now), fresh):
            self._held[self._own] = Held(fresh, now)

    def merge(self, now: float, record: NodeRecord) -> bool:
        """Keep the record if it is of a member and newer than what is held; True if it was kept."""
        held = self._held.get(record.node)
        if record.node == self._own or record.node not in self._names:
            return False
        if held is not None and record.order <= held.record.order:
            return False
        self._held[record.node] = Held(record, now)
        return True

    def charge(self, node_id: str, work_s: float, requests: int = 1) -> None:
        """Work was just sent to this node; counts in `get` until its next record (LSQ: own increments)."""
        held = self._held.get(node_key(node_id))
        if held is not None:
            held.charged_s += work_s
            held.charged_requests += requests

    # --- anti-entropy

    def digest(self) -> dict[int, Version]:
        """Versions held, by node key in ascending order."""
        return {key: self._held[key].record.order for key in sorted(self._held)}

    def newer_than(self, now: float, low: int, high: int, known: Mapping[int, Version]) -> list[NodeRecord]:
        """Records with low <= key <= high that are newer than `known` (a key not in it is not known at all), aged."""
        return [
            held.at(now)
            for key, held in self._held.items()
            if low <= key <= high and held.record.order > known.get(key, (-1, -1))
        ]

    def older_than(self, known: Mapping[int, Version]) -> dict[int, Version]:
        """The keys of members of which `known` has a newer version, with the version held here ((0, 0) = none)."""
        mine = {
            key: self._held[key].record.order if key in self._held else (0, 0)
            for key in known
            if key in self._names and key != self._own
        }
        return {key: version for key, version in mine.items() if known[key] > version}


def _differs(told: NodeRecord, fresh: NodeRecord) -> bool:
    """Whether `fresh` says something that readers of `told` cannot extrapolate, or `told` is too old."""
    fill = abs(fresh.blocks_used - told.blocks_used) / max(1, fresh.blocks_total)
    return (
        told.age_s >= HEARTBEAT_S
        or abs(fresh.work_s - told.work_s) > WORK_STEP_S
        or fill > FILL_STEP
        or (fresh.running, fresh.waiting, fresh.max_running, fresh.blocks_total)
        != (told.running, told.waiting, told.max_running, told.blocks_total)
    )

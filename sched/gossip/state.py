"""The load of all nodes as this node knows it: a table with the newest record of each member, merged packet by packet.

Rows are in the order of node keys, which is the same on every node that knows the same members, so two nodes can
compare all their versions by position (sched/gossip/exchange.py). numpy works on many records: it decodes, checks,
compares and merges a packet of fifteen records without a Python loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sched.gossip.record import (
    FLOAT_WORDS,
    IDENTITY_WORDS,
    RECORD,
    RECORD_BYTES,
    RECORD_WORDS,
    RESIDUAL_WORD,
    NodeRecord,
    Version,
    node_key,
)
from sched.membership.serial import newer_of

__all__ = ["HEARTBEAT_S", "ClusterView", "NodeRecord", "Version", "node_key"]

HEARTBEAT_S = 1.0
"""An unchanged record is published again after this time, so that its age stays a sign of life."""

WORK_STEP_S = 0.05
FILL_STEP = 0.05
"""Changes of the queue (seconds) and of shares (KV use, tiers, network) that cause a new version."""

LAST_KEY = 2**64 - 1
_INFINITE = 0x7F800000
_HALF_INFINITE = 0x7C00
_INCARNATION = np.uint64(32)
"""Floats of 32 and 16 bits below these, read as integers, are finite and not negative."""

Keys = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]
Words = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.intp]


RECEIVED_AT, CHARGED_S, CHARGED_REQUESTS = range(3)
"""Columns of local facts about a record: the time of its arrival, and the work sent to the node since, which the record
does not include."""


class ClusterView:
    """The newest record of each member. Rejects records of nodes that were not admitted."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._own = node_key(node_id)
        self._own_key = np.uint64(self._own)
        self._names: dict[int, str] = {self._own: node_id}
        self._stale_rows = False  # members changed since the last layout of the rows
        self._keys: Keys = np.array([self._own], np.uint64)
        self._row_of = {self._own: 0}
        self._orders = np.zeros(1, np.uint64)  # incarnation << 32 | version, 0 = no record yet
        self._words: Words = np.zeros((1, RECORD_WORDS), "<u4")
        self._held = np.zeros((1, 3))  # RECEIVED_AT, CHARGED_S, CHARGED_REQUESTS
        self._fingerprint: int | None = None
        self._changed = True
        self.rival: int | None = None  # incarnation of a held own record of another process

    # --- membership

    def admit(self, node_id: str) -> None:
        """Accept records of this node from now on."""
        self._names[node_key(node_id)] = node_id
        self._stale_rows = self._changed = True

    def forget(self, node_id: str) -> None:
        """The node is gone: drop its record and accept no more."""
        self._lay_out()  # a node that returns before the next layout must not find its old record
        if self._names.pop(node_key(node_id), None) is not None:
            self._stale_rows = True
            self._lay_out()

    def _lay_out(self) -> None:
        """Give every member a row, in the order of keys."""
        if not self._stale_rows:
            return
        self._stale_rows, self._fingerprint = False, None
        keys = np.sort(np.fromiter(self._names, np.uint64, len(self._names)))
        kept = np.isin(keys, self._keys, assume_unique=True)
        rows = np.searchsorted(self._keys, keys[kept])

        orders = np.zeros(keys.size, np.uint64)
        words = np.zeros((keys.size, RECORD_WORDS), "<u4")
        held = np.zeros((keys.size, 3))
        orders[kept], words[kept], held[kept] = self._orders[rows], self._words[rows], self._held[rows]
        self._orders, self._words, self._held = orders, words, held
        self._keys = keys
        self._row_of = {key: row for row, key in enumerate(keys.tolist())}

    def _row(self, key: int) -> int | None:
        self._lay_out()
        return self._row_of.get(key)

    # --- reading

    def get(self, node_id: str, now: float) -> NodeRecord | None:
        """The node's load as of `now`, with the work charged to it here; None before its first record arrived."""
        row = self._row(node_key(node_id))
        if row is None or not self._orders[row]:
            return None
        return self._charged(row, now)

    def _charged(self, row: int, now: float) -> NodeRecord:
        record = NodeRecord.unpack(self._words[row].tobytes())
        received_at, charged_s, charged_requests = self._held[row].tolist()
        passed = max(0.0, now - received_at)
        work_s = max(0.0, record.work_s + charged_s - passed)
        waiting = record.waiting + int(charged_requests)
        return replace(record, age_s=record.age_s + passed, work_s=work_s, waiting=waiting)

    def records(self, now: float) -> dict[str, NodeRecord]:
        """What every node with a record said, as of `now`, by node id. Charges are left out: they outlive short
        requests by up to a heartbeat, and would count as load."""
        self._lay_out()
        rows = np.flatnonzero(self._orders)
        aged = self._aged(rows, now)
        names = [self._names[key] for key in self._keys[rows].tolist()]
        return {name: NodeRecord.unpack(words.tobytes()) for name, words in zip(names, aged, strict=True)}

    def table(self, now: float) -> tuple[list[str], Records]:
        """Node ids and their records as of `now`, charges included, as arrays: for decisions over a thousand nodes.

        A node without a record yet has version 0.
        """
        self._lay_out()
        held = self._held
        records = self._aged(np.arange(self._keys.size), now, held[:, CHARGED_S]).view(RECORD)[:, 0]
        waiting = records["waiting_standard"] + held[:, CHARGED_REQUESTS]
        records["waiting_standard"] = np.minimum(waiting, 0xFFFF).astype(np.uint16)
        return [self._names[key] for key in self._keys.tolist()], records

    def _aged(self, rows: Rows, now: float, charged_s: npt.NDArray[np.float64] | float = 0.0) -> Words:
        words = self._words[rows]
        records = words.view(RECORD)[:, 0]
        passed = np.maximum(0.0, now - self._held[rows, RECEIVED_AT])
        records["work_s"] = np.maximum(0.0, records["work_s"] + charged_s - passed)
        records["age_s"] += passed
        return words

    # --- writing

    def publish(self, now: float, incarnation: int, record: NodeRecord) -> None:
        """Take this node's load. It becomes a new version if it differs from the others' extrapolation, or as a
        heartbeat."""
        row = self._row(self._own)
        assert row is not None, "a view always has a row for its own node"
        published = NodeRecord.unpack(self._words[row].tobytes()) if self._orders[row] else None
        passed = now - float(self._held[row, RECEIVED_AT])
        if published is None or published.incarnation != incarnation or _differs(published.aged(passed), record):
            version = published.version + 1 if published else 1
            fresh = replace(record, node=self._own, incarnation=incarnation, version=version, age_s=0.0)
            words = np.frombuffer(fresh.pack(), "<u4").reshape(1, RECORD_WORDS)
            self._put(np.array([row]), words, np.array([incarnation << 32 | version], np.uint64), now)
        self._held[row, CHARGED_S:] = 0.0  # `record` counts what this node has sent to itself

    def merge(self, now: float, record: NodeRecord) -> bool:
        """Keep the record if it is of a member and newer than the held one; returns whether it was kept."""
        return self.merge_packed(now, record.pack())[0] == 1

    def merge_packed(self, now: float, data: bytes) -> tuple[int, int]:
        """`merge` of records packed one after the other; returns the numbers of (kept, rejected) records.

        Raises ValueError, and keeps none, if the length is wrong or a float is negative or not finite.
        """
        if not data or len(data) % RECORD_BYTES:
            raise ValueError(f"records have {RECORD_BYTES} bytes each, got {len(data)}")
        words = np.frombuffer(data, "<u4").reshape(-1, RECORD_WORDS)
        if words.take(FLOAT_WORDS, axis=1).max() >= _INFINITE or words[:, RESIDUAL_WORD].max() >> 16 >= _HALF_INFINITE:
            raise ValueError("record with a field that is negative or not finite")
        self._lay_out()
        identities = words.take(IDENTITY_WORDS, axis=1).view("<u8")
        keys, orders = identities[:, 0], identities[:, 1]
        if (own := keys == self._own_key).any():
            self._compare_own(orders[own])
        rows = self._keys.searchsorted(keys)
        np.minimum(rows, self._keys.size - 1, out=rows)
        news = (self._keys[rows] == keys) & newer_of(orders, self._orders[rows]) & (keys != self._own_key)
        kept = int(np.count_nonzero(news))
        if kept < news.size:
            rows, words, orders = rows[news], words[news], orders[news]
        if kept:
            self._put(rows, words, orders, now)
        return kept, news.size - kept

    def _compare_own(self, orders: Keys) -> None:
        """Others return records of this node; one that is at least as new as the last published one is not from this
        process."""
        published = np.full(orders.size, self._orders[self._row(self._own)])
        foreign = orders[(orders != published) & ~newer_of(published, orders)]
        if foreign.size:
            self.rival = int(foreign[0]) >> 32

    def _put(self, rows: Rows, words: Words, orders: Keys, now: float) -> None:
        before = self._orders[rows]
        self._orders[rows] = orders
        if (self._orders[rows] != orders).any():  # two records of one node: the newer one must be written last
            ascending = np.argsort(orders, kind="stable")
            rows, words, orders = rows[ascending], words[ascending], orders[ascending]
            self._orders[rows] = orders
        if ((before ^ orders) >> _INCARNATION).any():
            self._fingerprint = None
        self._changed = self._changed or self._differ(rows, words, now)
        self._words[rows] = words
        self._held[rows] = (now, 0.0, 0.0)

    def _differ(self, rows: Rows, words: Words, now: float) -> bool:
        """Whether one of these records is news, as its owner decides it (`_differs`), and no heartbeat."""
        held = self._words[rows]
        if ((held ^ words) & _EXACT).any():
            return True
        before, after = held.view(RECORD)[:, 0], words.view(RECORD)[:, 0]
        expected_s = np.maximum(0.0, before["work_s"] - (now - self._held[rows, RECEIVED_AT]))
        if (np.abs(after["work_s"] - expected_s) > WORK_STEP_S).any():
            return True
        most = dict.fromkeys(("blocks_used", "blocks_soon"), FILL_STEP * np.maximum(1, after["blocks_total"]))
        most |= dict.fromkeys(("dram_fill", "ssd_fill", "nic_in", "nic_out"), np.float64(255 * FILL_STEP))
        return any((_apart(before[name], after[name]) > step).any() for name, step in most.items())

    def take_change(self) -> bool:
        """Whether since the last call a node was admitted, or a record came that is more than a heartbeat."""
        changed, self._changed = self._changed, False
        return changed

    def charge(self, node_id: str, work_s: float, requests: int = 1) -> None:
        """Record that work was just sent to this node; it counts in `get` until the node's next record (LSQ: own
        increments)."""
        row = self._row(node_key(node_id))
        if row is not None and self._orders[row]:
            self._held[row] += (0.0, work_s, requests)

    # --- anti-entropy

    @property
    def keys(self) -> Keys:
        """The keys of all members, ascending: row i of all arrays below belongs to keys[i]."""
        self._lay_out()
        return self._keys

    @property
    def orders(self) -> npt.NDArray[np.uint64]:
        """incarnation << 32 | version per row, 0 = no record."""
        self._lay_out()
        return self._orders

    @property
    def fingerprint(self) -> int:
        """Equal in two views with the same members in the same incarnations: then versions compare row by row."""
        self._lay_out()
        if self._fingerprint is None:
            mixed = self._keys ^ (self._orders >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
            self._fingerprint = int((mixed ^ mixed >> np.uint64(32)).sum(dtype=np.uint64))
        return self._fingerprint

    def packed(self, now: float, rows: Rows) -> bytes:
        """The records of these rows as of `now`, without charges, to pass on."""
        return self._aged(rows, now).tobytes()


def _apart(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Of unsigned numbers."""
    apart: npt.NDArray[np.int64] = np.abs(after.astype(np.int64) - before)
    return apart


def _differs(published: NodeRecord, fresh: NodeRecord) -> bool:
    """Whether readers of `published` cannot extrapolate `fresh`, or `published` is too old."""
    blocks = max(1, fresh.blocks_total)
    moves = (
        (fresh.blocks_used - published.blocks_used) / blocks,
        (fresh.blocks_soon - published.blocks_soon) / blocks,
        fresh.dram_fill - published.dram_fill,
        fresh.ssd_fill - published.ssd_fill,
        fresh.nic_in - published.nic_in,
        fresh.nic_out - published.nic_out,
    )
    return (
        published.age_s >= HEARTBEAT_S
        or abs(fresh.work_s - published.work_s) > WORK_STEP_S
        or max(map(abs, moves)) > FILL_STEP
        or _counts(fresh) != _counts(published)
    )


def _counts(record: NodeRecord) -> tuple[int, ...]:
    """The fields of which every change matters."""
    waiting = (record.waiting, record.waiting_interactive, record.waiting_batch)
    rest = (record.blocks_total, record.health, record.flags, record.weights)
    return (*waiting, record.running, record.max_running, *rest)


def _bits_of(*names: str) -> Words:
    """[RECORD_WORDS]: the bits of these fields."""
    record = np.zeros(1, RECORD)
    for name in names:
        record[name] = np.iinfo(RECORD[name]).max
    return record.view("<u4")


_EXACT = _bits_of(
    "incarnation", "blocks_total", "running", "max_running", "waiting_interactive", "waiting_standard", "waiting_batch",
    "flags", "health", "weights",
)  # fmt: skip
"""The fields of `_counts` in a packed record, and its owner's incarnation."""

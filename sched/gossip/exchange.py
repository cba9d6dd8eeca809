"""Anti-entropy of node records by version vector; every packet is self-contained.

    SUMMARY  fingerprint u64, start u16, then a version u32 per row from `start` on
    PICK     fingerprint u64, start u16, then a bit per row: "send me these"
    DIGEST   low u64, high u64, then (key u64, order u64)*: "these are all my versions in low .. high"
    WANT     key u64*: "send me your newer records of these"
    DELTA    records (sched/gossip/record.py)

A few times per period a node sends its versions to another node. If the fingerprint shows that the receiver has the
same members in the same incarnations, it compares the versions row by row, sends its newer records and picks the
sender's newer ones. Otherwise it answers with its versions by key, and the same happens in the other direction. Loss
and reordering only cost freshness: the next exchange offers the same versions again.

A node asks one partner at a time: two concurrent answers would contain the same news, which would waste a fifth of all
records. A node that is asked postpones its own next question. Without this, because partners are random, some nodes
would take part in half as many exchanges again as others over a few seconds, and an exchange costs both sides about the
same.

A node for which no load has changed for a few exchanges asks less and less often, down to once in SLOWEST_S. The first
change brings the full rate back: its own, or one in a record from another node. So a change spreads as fast in an idle
cluster as in a busy one, and only heartbeats (state.py) spread more slowly.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sched.gossip.record import RECORD_BYTES
from sched.gossip.state import LAST_KEY, ClusterView
from sched.membership.events import SendPacket
from sched.membership.member import Address, Member, Preset, Rng
from sched.membership.packet import BODY_BYTES, Kind, PacketError, seal
from sched.membership.serial import newer_of

_part = struct.Struct("<QH")
_range = struct.Struct("<QQ")
_entry = np.dtype([("key", "<u8"), ("order", "<u8")])
VERSIONS = (BODY_BYTES - _part.size) // 4
ENTRIES = (BODY_BYTES - _range.size) // _entry.itemsize
RECORDS = BODY_BYTES // RECORD_BYTES
WANTS = BODY_BYTES // 8

OWN, OTHERS = 0.6, 0.3
"""Number of intervals by which each exchange that this node, or another node, begins postpones this node's next one.
Their sum sets the rate. OTHERS alone would balance perfectly, but nodes that are asked often would stop asking."""

ALONE_S = 0.25
"""Interval of a node without peers, seconds."""

MAX_INTERVALS = 2.0
"""A node asks again after at most this many intervals, however often it was asked."""

QUICK = 4
"""Number of exchanges that a node begins at the full rate after a change. With as many by every node that has heard of
it, one node in fifty has not been asked by any of them; it hears of the change in the slower ones that follow."""

SLOWEST_S = 0.25
"""Seconds between two exchanges when no load has changed for long, unless the full rate is lower."""

Rows = npt.NDArray[np.intp]


class Exchange:
    """Keeps one ClusterView consistent with those of other nodes."""

    def __init__(self, now: float, view: ClusterView, tag: int, preset: Preset, rng: Rng) -> None:
        self.counters: Counter[str] = Counter()  # records_merged, records_stale, summaries_<un>matched, dropped_<why>
        self._full_s = self._interval_s = preset.state_period_s / preset.state_fanout  # at the full rate, and now
        self._begun_at, self.next_at = now, now + rng.random() * self._interval_s
        self._unchanged = 0  # exchanges begun since the last change of a load
        self._view, self._tag, self._preset, self._rng = view, tag, preset, rng

    def tick(self, now: float, peers: Sequence[Member]) -> list[SendPacket]:
        """Offer the view to a random peer, about state_fanout times per period while loads change."""
        self._hurry(now)
        if now < self.next_at:
            return []
        self._begun_at = now
        self._unchanged += 1
        partners = min(self._preset.state_fanout, max(1, len(peers)))
        self._full_s = self._preset.state_s(len(peers) + 1) / partners
        stretched_s = self._full_s * (1 << min(8, max(0, self._unchanged - QUICK)))
        self._interval_s = max(self._full_s, min(stretched_s, SLOWEST_S))
        self.next_at = max(self.next_at, now - self._interval_s / 2) + OWN * self._interval_s
        if not peers:
            self.next_at = now + ALONE_S
            return []
        address = self._rng.choice(peers).address
        return [SendPacket(address, packet) for packet in self._summaries()]

    @property
    def quick(self) -> bool:
        """Whether exchanges have their full rate because of a change."""
        return self._unchanged <= QUICK

    def _hurry(self, now: float) -> None:
        """Return to the full rate if a load has changed."""
        if self._view.take_change():
            if not self.quick:
                self._interval_s = self._full_s
                self.next_at = min(self.next_at, max(now, self._begun_at + OWN * self._full_s))
            self._unchanged = 0

    def _asked(self) -> None:
        """Another node has begun an exchange."""
        latest = self._begun_at + MAX_INTERVALS * self._interval_s
        self.next_at = max(self.next_at, min(self.next_at + OTHERS * self._interval_s, latest))

    def receive(self, now: float, source: Address, kind: Kind, tag: int, body: bytes) -> list[SendPacket]:
        """Answer one packet. Never raises: invalid packets are counted and dropped."""
        try:
            if tag != self._tag:
                raise PacketError("foreign")
            match kind:
                case Kind.SUMMARY:
                    return [SendPacket(source, packet) for packet in self._compare(now, body)]
                case Kind.PICK:
                    return [SendPacket(source, packet) for packet in self._picked(now, body)]
                case Kind.DIGEST:
                    return [SendPacket(source, packet) for packet in self._compare_keys(now, body)]
                case Kind.WANT:
                    return [SendPacket(source, packet) for packet in self._wanted(now, body)]
                case Kind.DELTA:
                    self._merge(now, body)
                case _:
                    raise PacketError("kind")
        except PacketError as error:
            self.counters[f"dropped_{error}"] += 1
        return []

    # --- by row

    def _summaries(self) -> Iterator[bytes]:
        versions = self._view.orders.astype("<u4")  # the low half of an order
        for start in range(0, versions.size, VERSIONS):
            head = _part.pack(self._view.fingerprint, start)
            yield self._seal(Kind.SUMMARY, head + versions[start : start + VERSIONS].tobytes())

    def _compare(self, now: float, body: bytes) -> Iterator[bytes]:
        fingerprint, start, rest = _parted(body)
        if start == 0:
            self._asked()
        if fingerprint != self._view.fingerprint:
            self.counters["summaries_unmatched"] += 1
            if start == 0:
                yield from self._digests()
            return
        self.counters["summaries_matched"] += 1
        if len(rest) % 4:
            raise PacketError("malformed")
        theirs = np.frombuffer(rest, "<u4")
        mine = self._view.orders[start : start + theirs.size].astype("<u4")
        if mine.size != theirs.size:
            raise PacketError("malformed")
        yield from self._deltas(now, start + np.flatnonzero(newer_of(mine, theirs)))
        if (picked := newer_of(theirs, mine)).any():
            bits = np.packbits(picked, bitorder="little").tobytes()
            yield self._seal(Kind.PICK, _part.pack(fingerprint, start) + bits)

    def _picked(self, now: float, body: bytes) -> Iterator[bytes]:
        fingerprint, start, bits = _parted(body)
        if fingerprint != self._view.fingerprint:
            return  # members changed since the summary; the next round asks again
        rows = start + np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        yield from self._deltas(now, rows[rows < self._view.keys.size])

    # --- by key

    def _digests(self) -> Iterator[bytes]:
        """All known versions. Every packet contains the key range for which it is complete."""
        keys, orders = self._view.keys, self._view.orders
        entries = np.zeros(np.count_nonzero(orders), _entry)
        entries["key"], entries["order"] = keys[orders > 0], orders[orders > 0]
        for start in range(0, max(1, entries.size), ENTRIES):
            low = int(entries["key"][start]) if start else 0
            end = start + ENTRIES
            high = int(entries["key"][end]) - 1 if end < entries.size else LAST_KEY
            yield self._seal(Kind.DIGEST, _range.pack(low, high) + entries[start:end].tobytes())

    def _compare_keys(self, now: float, body: bytes) -> Iterator[bytes]:
        if len(body) < _range.size or (len(body) - _range.size) % _entry.itemsize:
            raise PacketError("malformed")
        low, high = _range.unpack_from(body)
        theirs = np.frombuffer(body, _entry, offset=_range.size)
        keys = self._view.keys
        known = np.zeros(keys.size, np.uint64)
        rows = np.minimum(np.searchsorted(keys, theirs["key"]), keys.size - 1)
        found = keys[rows] == theirs["key"]
        known[rows[found]] = theirs["order"][found]
        mine = self._view.orders
        within = (keys >= np.uint64(low)) & (keys <= np.uint64(high))
        yield from self._deltas(now, np.flatnonzero(within & (mine > known)))
        wanted = keys[known > mine]
        for start in range(0, wanted.size, WANTS):
            yield self._seal(Kind.WANT, wanted[start : start + WANTS].astype("<u8").tobytes())

    def _wanted(self, now: float, body: bytes) -> Iterator[bytes]:
        if len(body) % 8:
            raise PacketError("malformed")
        rows = np.flatnonzero(np.isin(self._view.keys, np.frombuffer(body, "<u8")) & (self._view.orders > 0))
        yield from self._deltas(now, rows)

    # --- records

    def _deltas(self, now: float, rows: Rows) -> Iterator[bytes]:
        if rows.size:
            data = self._view.packed(now, rows)
            for start in range(0, len(data), RECORDS * RECORD_BYTES):
                yield self._seal(Kind.DELTA, data[start : start + RECORDS * RECORD_BYTES])

    def _merge(self, now: float, body: bytes) -> None:
        try:
            kept, stale = self._view.merge_packed(now, body)
        except ValueError:
            raise PacketError("malformed") from None
        self.counters["records_merged"] += kept
        self.counters["records_stale"] += stale
        self._hurry(now)

    def _seal(self, kind: Kind, body: bytes) -> bytes:
        return seal(kind, self._tag, body)


def _parted(body: bytes) -> tuple[int, int, bytes]:
    """(fingerprint, start, the rest)."""
    if len(body) < _part.size:
        raise PacketError("malformed")
    fingerprint, start = _part.unpack_from(body)
    return fingerprint, start, body[_part.size :]

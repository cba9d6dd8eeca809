"""Anti-entropy of node records: digest -> delta and want -> delta, each packet complete in itself.

    DIGEST  low u64, high u64, then (key u64, incarnation u32, version u32)*: "this is all I know in low .. high"
    DELTA   records of 64 bytes
    WANT    (key, incarnation, version)*: "you know newer ones than these"

Loss and reordering cost freshness only: the next round offers the same versions again.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

from sched.events import SendPacket
from sched.member import Address, Member, Preset, Rng
from sched.packet import BODY_BYTES, Kind, PacketError, seal
from sched.state import RECORD, ClusterView, NodeRecord, Version

_range = struct.Struct("<QQ")
_entry = struct.Struct("<QII")
ENTRIES = (BODY_BYTES - _range.size) // _entry.size
RECORDS = BODY_BYTES // RECORD.size

LAST_KEY = 2**64 - 1


class Exchange:
    """Keeps one ClusterView in step with the others'."""

    def __init__(self, now: float, view: ClusterView, tag: int, preset: Preset, rng: Rng) -> None:
        self.counters: Counter[str] = Counter()  # records_merged, records_stale, dropped_<why>
        self.next_at = now + rng.random() * preset.state_period_s
        self._view, self._tag, self._preset, self._rng = view, tag, preset, rng

    def tick(self, now: float, peers: Sequence[Member]) -> list[SendPacket]:
        """Offer the view to a few random peers, once per period."""
        if now < self.next_at:
            return []
        self.next_at = now + self._preset.state_period_s
        chosen = self._rng.sample(peers, min(self._preset.fanout, len(peers)))
        packets = list(self._digests()) if chosen else []
        return [SendPacket(peer.address, packet) for peer in chosen for packet in packets]

    def receive(self, now: float, source: Address, kind: Kind, tag: int, body: bytes) -> list[SendPacket]:
        """Answer one packet. Never raises: what cannot be read is counted and dropped."""
        try:
            if tag != self._tag:
                raise PacketError("foreign")
            if kind is Kind.DIGEST:
                return self._compare(now, source, body)
            if kind is Kind.WANT:
                known = _entries(body)
                records = self._view.newer_than(now, 0, LAST_KEY, known)
                return self._deltas(source, [record for record in records if record.node in known])
            self._merge(now, body)
        except PacketError as error:
            self.counters[f"dropped_{error}"] += 1
        return []

    def _digests(self) -> list[bytes]:
        """The whole digest; every packet tells the range of keys for which it is complete."""
        entries = list(self._view.digest().items())
        starts = range(0, max(1, len(entries)), ENTRIES)
        packets = []
        for start in starts:
            part = entries[start : start + ENTRIES]
            low = part[0][0] if start else 0
            high = entries[start + ENTRIES][0] - 1 if start + ENTRIES < len(entries) else LAST_KEY
            packets.append(seal(Kind.DIGEST, self._tag, _range.pack(low, high) + _packed(dict(part))))
        return packets

    def _compare(self, now: float, source: Address, body: bytes) -> list[SendPacket]:
        if len(body) < _range.size:
            raise PacketError("malformed")
        low, high = _range.unpack_from(body)
        known = _entries(body[_range.size :])
        answers = self._deltas(source, self._view.newer_than(now, low, high, known))
        if wanted := self._view.older_than(known):
            answers.append(SendPacket(source, seal(Kind.WANT, self._tag, _packed(wanted))))
        return answers

    def _deltas(self, address: Address, records: Sequence[NodeRecord]) -> list[SendPacket]:
        parts = [records[start : start + RECORDS] for start in range(0, len(records), RECORDS)]
        bodies = [b"".join(record.pack() for record in part) for part in parts]
        return [SendPacket(address, seal(Kind.DELTA, self._tag, body)) for body in bodies]

    def _merge(self, now: float, body: bytes) -> None:
        if len(body) % RECORD.size:
            raise PacketError("malformed")
        for start in range(0, len(body), RECORD.size):
            try:
                record = NodeRecord.unpack(body[start : start + RECORD.size])
            except ValueError:
                raise PacketError("malformed") from None
            self.counters["records_merged" if self._view.merge(now, record) else "records_stale"] += 1


def _packed(versions: dict[int, Version]) -> bytes:
    return b"".join(_entry.pack(key, *version) for key, version in versions.items())


def _entries(body: bytes) -> dict[int, Version]:
    if len(body) % _entry.size:
        raise PacketError("malformed")
    return {key: (incarnation, version) for key, incarnation, version in _entry.iter_unpack(body)}

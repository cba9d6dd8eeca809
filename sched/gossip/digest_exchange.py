"""Anti-entropy of cache digests: a node with an old state gets the missing deltas, or a full copy after a gap. Pure.

    HELD        (node key u64, epoch u32, seq u32)*: "I hold these states", for some or all digests
    CHANGES     node key u64, a Delta (sched/gossip/digest.py)
    COPY        node key u64, a Page

Once per period a node takes the changes of its own digest as numbered deltas and tells a few others which states it
holds. A receiver with a newer state sends the missing part; one with an older state answers with its own states and
then gets it. Every node keeps the last deltas of every other, so news reaches all nodes in a few rounds, and only new
or disconnected nodes need full copies. A later round makes up for a lost packet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from sched.gossip.digest import CuckooDigest, Delta, DigestError, Page, assemble, pages_of
from sched.gossip.holders import Holders
from sched.gossip.record import node_key
from sched.membership.events import SendPacket
from sched.membership.member import Address, Member, Preset, Rng
from sched.membership.packet import BODY_BYTES, Kind, PacketError, seal
from sched.membership.serial import newer, outbidding

KEPT_DELTAS = 16
"""Deltas kept per node: the number of deltas that a reader may miss before it needs a full copy."""

COPIES = 4
"""Maximum number of full copies in answer to one packet. A new node gets the rest from others and in later rounds."""

_state = np.dtype([("key", "<u8"), ("epoch", "<u4"), ("seq", "<u4")])
STATES = BODY_BYTES // _state.itemsize

State = tuple[int, int]
"""(epoch, seq)."""

NOTHING: State = (0, 0)
"""No digest yet: no epoch is 0."""


def _newer(state: State, than: State) -> bool:
    if state[0] == than[0]:
        return state[1] > than[1]
    return than[0] == 0 or (state[0] != 0 and newer(state[0], than[0]))


class DigestExchange:
    """Keeps `holders` consistent with the digests of all members; the cache updates `own`, this node's digest."""

    def __init__(self, now: float, node_id: str, tag: int, preset: Preset, rng: Rng) -> None:
        self.own = CuckooDigest(
            epoch=1 + (rng.getrandbits(16) << 8)
        )  # deltas of another process must not seem to follow
        self.holders = Holders()
        self.counters: Counter[str] = Counter()  # digest_deltas, digest_copies, dropped_malformed
        self.next_at = now + rng.random() * preset.digest_period_s
        self._node_id, self._tag, self._preset, self._rng = node_id, tag, preset, rng
        self._names: dict[int, str] = {node_key(node_id): node_id}
        self._log: dict[str, deque[Delta]] = {}
        self._parts: dict[
            str, tuple[tuple[int, int, int], dict[int, Page]]
        ] = {}  # incomplete full copies, by state and size
        self.holders.admit(node_id)

    # --- members

    def admit(self, node_id: str) -> None:
        self._names[node_key(node_id)] = node_id
        self.holders.admit(node_id)

    def forget(self, node_id: str) -> None:
        self._names.pop(node_key(node_id), None)
        self._log.pop(node_id, None)
        self._parts.pop(node_id, None)
        self.holders.forget(node_id)

    # --- rounds

    def tick(self, now: float, peers: Sequence[Member]) -> list[SendPacket]:
        """Once per period, number this node's changes and tell a few random peers which states it holds."""
        if now < self.next_at:
            return []
        self.next_at = now + self._preset.digest_period_s
        self._take_own()
        chosen = self._rng.sample(peers, min(self._preset.state_fanout, len(peers)))
        packets = list(self._held(self._names)) if chosen else []
        return [SendPacket(peer.address, packet) for peer in chosen for packet in packets]

    def _take_own(self, doubted: bool = False) -> None:
        """Number the changes. A digest that is new or has grown cannot be followed by deltas and is loaded in full.
        `doubted`: another node holds a different digest of this node."""
        known = self.holders.state(self._node_id)
        if known is None and not self.own.changed and not doubted:
            return  # an unused cache needs no digest
        while (delta := self.own.take_delta()) is not None:
            if self.holders.apply(self._node_id, delta):
                self._log.setdefault(self._node_id, deque(maxlen=KEPT_DELTAS)).append(delta)
        if known is None or known[0] != self.own.epoch:
            copy = assemble(self.own.pages())
            assert copy is not None
            self._log.pop(self._node_id, None)
            self.holders.load(self._node_id, *copy)

    def receive(self, source: Address, kind: Kind, tag: int, body: bytes) -> list[SendPacket]:
        """Answer one packet. Never raises: invalid packets are counted and dropped."""
        try:
            if tag != self._tag:
                raise PacketError("foreign")
            if kind is Kind.HELD:
                return [SendPacket(source, packet) for packet in self._compare(body)]
            name = self._names.get(int.from_bytes(body[:8], "little"))
            if name is not None and name != self._node_id:
                self._take(name, kind, body[8:])
        except (PacketError, DigestError) as error:
            self.counters["dropped_foreign" if str(error) == "foreign" else "dropped_malformed"] += 1
        return []

    # --- queries

    def _held(self, keys: Sequence[int] | dict[int, str]) -> Iterator[bytes]:
        """HELD packets with the states of these nodes' digests."""
        states = [(key, *(self.holders.state(self._names[key]) or NOTHING)) for key in keys]
        entries = np.array(states, _state)
        for start in range(0, entries.size, STATES):
            yield seal(Kind.HELD, self._tag, entries[start : start + STATES].tobytes())

    def _compare(self, body: bytes) -> Iterator[bytes]:
        if len(body) % _state.itemsize:
            raise PacketError("malformed")
        copies, behind = 0, []
        for key, epoch, seq in np.frombuffer(body, _state).tolist():
            name = self._names.get(key)
            if name is None:
                continue
            mine = self.holders.state(name) or NOTHING
            if mine == (epoch, seq):
                continue
            ahead = _newer(mine, (epoch, seq))
            if name == self._node_id and not ahead:  # from an earlier process, or forged
                self.own.begin_epoch(outbidding(epoch, self.own.epoch, self._rng))
                self._take_own(doubted=True)
            elif _newer((epoch, seq), mine):
                behind.append(key)
            elif not ahead:
                continue  # half a circle apart: their owner outbids both
            elif deltas := self._since(name, epoch, seq):
                for delta in deltas:
                    yield seal(Kind.CHANGES, self._tag, key.to_bytes(8, "little") + delta.pack())
            elif copies < COPIES:
                copies += 1
                for page in pages_of(*mine, self.holders.slots(name)):
                    yield seal(Kind.COPY, self._tag, key.to_bytes(8, "little") + page.pack())
        if behind:
            yield from self._held(behind)

    def _since(self, name: str, epoch: int, seq: int) -> list[Delta]:
        """The deltas from a state to the held one; empty if one is missing."""
        deltas = [delta for delta in self._log.get(name, ()) if delta.epoch == epoch and delta.seq > seq]
        return deltas if deltas and deltas[0].base == seq else []

    # --- what arrives

    def _take(self, name: str, kind: Kind, data: bytes) -> None:
        if kind is Kind.CHANGES:
            delta = Delta.unpack(data)
            if self.holders.apply(name, delta):
                self.counters["digest_deltas"] += 1
                self._log.setdefault(name, deque(maxlen=KEPT_DELTAS)).append(delta)
            return
        page = Page.unpack(data)
        state = (page.epoch, page.seq)
        if not _newer(state, self.holders.state(name) or NOTHING):
            return
        of = (*state, page.buckets)
        held, parts = self._parts.get(name, (of, {}))
        if held != of:
            parts = {}
        parts[page.start] = page
        self._parts[name] = (of, parts)
        if (copy := assemble(parts.values())) is not None:
            self.counters["digest_copies"] += 1
            self._log.pop(name, None)
            del self._parts[name]
            self.holders.load(name, *copy)

"""How hot prefixes are told: every node sends its short list straight to its cell when it changed, seldom. Pure.

A list is one packet and its period long, so there is no relaying: at 256 nodes it costs 20 kB/s at most. A lost
packet is made up for by the next list; an unchanged one is repeated now and then for those who came late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sched.events import SendPacket
from sched.heat import HeatCounter, HotKey, HotList, hottest, pack_list, unpack_list
from sched.member import Address, Member, Preset, Rng
from sched.packet import Kind, seal
from sched.record import node_key

REPEAT = 6
"""Periods after which a list is told again though nothing changed."""


class HotLists:
    """The lists of the cell. The node counts its own hits at `own`."""

    def __init__(self, now: float, node_id: str, tag: int, preset: Preset, rng: Rng) -> None:
        self.own = HeatCounter()
        self.counters: Counter[str] = Counter()  # hot_lists, dropped_<why>
        self.next_at = now + rng.random() * preset.hot_period_s
        self._node_id, self._tag, self._period_s = node_id, tag, preset.hot_period_s
        self._names: dict[int, str] = {}
        self._lists: dict[str, HotList] = {}
        self._quiet = 0  # periods since the own list was told

    def admit(self, node_id: str) -> None:
        self._names[node_key(node_id)] = node_id

    def forget(self, node_id: str) -> None:
        self._names.pop(node_key(node_id), None)
        self._lists.pop(node_id, None)

    def hottest(self, count: int) -> list[HotKey]:
        """The cell's hottest keys with those who hold them, as far as told."""
        return hottest(self._lists, count)

    def tick(self, now: float, mates: Sequence[Member]) -> list[SendPacket]:
        """Tell the own list when it is due and says anything."""
        if now < self.next_at:
            return []
        self.next_at = now + self._period_s
        fresh = self.own.take_list(now)
        if fresh is not None:
            self._lists[self._node_id] = fresh
        self._quiet = 0 if fresh is not None else self._quiet + 1
        told = self._lists.get(self._node_id)
        if told is None or self._quiet % REPEAT:
            return []
        body = node_key(self._node_id).to_bytes(8, "little") + pack_list(told)
        packet = seal(Kind.HOT, self._tag, body)
        return [SendPacket(mate.address, packet) for mate in mates]

    def receive(self, source: Address, tag: int, body: bytes) -> list[SendPacket]:
        """Take a list. Never raises: what cannot be read is counted and dropped."""
        if tag != self._tag:
            self.counters["dropped_foreign"] += 1
            return []
        name = self._names.get(int.from_bytes(body[:8], "little"))
        try:
            told = unpack_list(body[8:])
        except ValueError:
            self.counters["dropped_malformed"] += 1
            return []
        if name is not None:
            self._lists[name] = told
            self.counters["hot_lists"] += 1
        return []

"""Two gossip cores that talk; what they said is the corpus, and what is fed goes to one of them."""

from __future__ import annotations

from random import Random

from sched.events import Datagram, Event, Join, SendPacket, Tick
from sched.gossip import GossipCore
from sched.member import Member, presets
from sched.state import NodeRecord

HERE, THERE = ("127.0.0.1", 1), ("127.0.0.1", 2)
SECONDS = 3


class GossipTarget:
    """A core that has joined another one, fed with datagrams that claim to be from it."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self._now = 0.0
        self._cores = {address: self._core(f"n{address[1]}", address) for address in (HERE, THERE)}
        self._deliver(HERE, Join(THERE))
        for _ in range(SECONDS * 20):
            self._now += 0.05
            for address in (HERE, THERE):
                self._deliver(address, Tick())
                self._cores[address].digests.own.add(hash((address, self._now)) % (1 << 63))

    @staticmethod
    def corpus() -> list[bytes]:
        return GossipTarget().said

    def feed(self, data: bytes) -> None:
        """One datagram, then time passes."""
        self._now += 0.001
        self._cores[HERE].handle(self._now, Datagram(THERE, data))
        self._cores[HERE].handle(self._now, Tick())

    def _core(self, name: str, address: tuple[str, int]) -> GossipCore:
        info = {"model": "m", "block_size": 16, "root": "aa" * 16, "share": 0}
        me = Member(name, address, "127.0.0.1:9", ("prefill",), info=info)
        return GossipCore(0.0, me, presets["local"], Random(address[1]), lambda: NodeRecord(blocks_total=9))

    def _deliver(self, to: tuple[str, int], event: Event) -> None:
        waiting = [(to, event)]
        while waiting:
            address, event = waiting.pop(0)
            for effect in self._cores[address].handle(self._now, event):
                if isinstance(effect, SendPacket) and effect.address in self._cores:
                    self.said.append(effect.payload)
                    waiting.append((effect.address, Datagram(address, effect.payload)))

"""Two gossip cores exchange packets, which are the corpus; one of them gets fuzzed packets. Then time passes: the state
left by a packet must not break the core, its peer or their readers later."""

from __future__ import annotations

from random import Random

from engine.scaling.role_changes import seen
from engine.scaling.scaler import loads
from lab.fuzz import forge
from sched.classes import CLASSES
from sched.gossip.core import GossipCore
from sched.gossip.state import NodeRecord
from sched.membership.events import Datagram, Event, Join, SendPacket, Tick
from sched.membership.member import Address, Member, presets
from sched.membership.packet import Kind, PacketError, seal, tag_of, unseal
from sched.role_change import RoleController
from sched.scaling.autoscaler import Autoscaler
from sched.scaling.bounds import parse
from sched.scaling.crew import Rules

HERE, THERE = ("127.0.0.1", 1), ("127.0.0.1", 2)
SECONDS = 3
HEADER_BYTES = 12
KEPT_PER_KIND = 6
KIND_AT = 3
PASSING_S = (0.001, 0.05, 0.3, 1.1)
"""Time after each datagram, in turn: the longest exceeds every period except that of the lists."""

PACKETS_MAX = 5_000
"""Maximum packets of an exchange that one event starts: with more, the two cores answer each other forever."""

INFO = {"model": "m", "block_size": 16, "root": "aa" * 16, "share": 0}


class GossipTarget:
    """A core that has joined another one, fed with datagrams that claim to be from it."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self._now, self._fed = 0.0, 0
        self._listens = True
        self._roles = RoleController("n1")
        rules = Rules(parse("prefill+decode=1..4"), CLASSES["standard"], 1.0, 2.0, 5.0)
        self._scaling = Autoscaler(rules)
        self._cores = {address: self._core(f"n{address[1]}", address) for address in (HERE, THERE)}
        self._deliver(HERE, Join(THERE))
        keys = Random(SECONDS)
        for _ in range(SECONDS * 20):
            self._now += 0.05
            for address in (HERE, THERE):
                self._deliver(address, Tick())
                self._cores[address].digests.own.add(keys.getrandbits(63))  # hash() differs between processes

        self._listens = False

    @staticmethod
    def corpus() -> list[bytes]:
        """The last few packets of every kind, because most packets are membership."""
        said = GossipTarget().said
        kinds = {kind: [packet for packet in said if packet[KIND_AT] == kind] for kind in Kind}
        return [packet for packets in kinds.values() for packet in packets[-KEPT_PER_KIND:]]

    def feed(self, data: bytes) -> None:
        """Feed one datagram, let time pass for both, and read all state of a core."""
        self._deliver(HERE, Datagram(THERE, data))
        self._deliver(HERE, Datagram(THERE, resealed(data)))
        self._deliver(HERE, Datagram(THERE, forge.packet(Random(data), TAG, INFO, THERE)))
        self._now += PASSING_S[self._fed % len(PASSING_S)]
        self._fed += 1
        for address in self._cores:
            self._deliver(address, Tick())
        self._read(self._cores[HERE])

    def _read(self, core: GossipCore) -> None:
        """Reads a core like placement, role changes, scaling, the live page and metrics."""
        records, members = core.records(self._now), core.membership.alive()
        self._roles.step(self._now, [seen(one, records[one.node_id]) for one in members if one.node_id in records])
        for effect in self._scaling.step(self._now, loads(members, records), acts=True):
            assert effect.role == "prefill+decode"
        core.table(self._now)
        core.summaries(self._now)
        core.elsewhere(self._now, Random(self._fed))
        core.digests.holders.best_hits([self._fed, 7, 8])
        sum(member.share + member.cost for member in members)

    def _core(self, name: str, address: Address) -> GossipCore:
        me = Member(name, address, "127.0.0.1:9", ("prefill", "decode"), info=INFO)
        return GossipCore(0.0, me, presets["local"], Random(address[1]), lambda: NodeRecord(blocks_total=9))

    def _deliver(self, to: Address, event: Event) -> None:
        waiting = [(to, event)]
        for _ in range(PACKETS_MAX):
            if not waiting:
                return
            address, event = waiting.pop(0)
            for effect in self._cores[address].handle(self._now, event):
                if isinstance(effect, SendPacket) and effect.address in self._cores:
                    if self._listens:
                        self.said.append(effect.payload)
                    waiting.append((effect.address, Datagram(address, effect.payload)))
        raise RecursionError(f"{PACKETS_MAX} packets after one event")


TAG = tag_of(Member("n1", HERE, info=INFO))


def resealed(data: bytes) -> bytes:
    """The packet with a correct checksum, as from a stranger who knows the protocol: mutations rarely keep it right."""
    try:
        unseal(data)
        return data
    except PacketError:
        kinds = list(Kind)
        return seal(
            kinds[data[KIND_AT] % len(kinds)] if len(data) > KIND_AT else Kind.HELD, TAG, data[HEADER_BYTES:1400]
        )

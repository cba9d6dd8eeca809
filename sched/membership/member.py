"""A member of the cluster as gossip describes it, and the timing presets of the protocol.

Statements about a node are ordered by (incarnation, status), and the newer one wins, so they may arrive late, twice and
in any order. Only the node itself raises its incarnation, to refute a false suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from sched.membership.serial import newer

Address = tuple[str, int]
"""Host and port. The same port number serves TCP for control and KV, and UDP for gossip."""

TEXT_BYTES = 64
"""Maximum length of a node id, role or host, bytes."""

MAX_COST = 1e9
"""Greatest price of a node per hour."""

LAST_WORDS = 2
"""Number of direct questions to a suspect, one probe timeout apart, before it is declared dead."""

T = TypeVar("T")


class Rng(Protocol):
    """The part of random.Random that the cores use; always passed in, so that a run can be replayed."""

    def random(self) -> float: ...
    def getrandbits(self, bits: int, /) -> int: ...
    def choice(self, items: Sequence[T], /) -> T: ...
    def sample(self, items: Sequence[T], k: int, /) -> list[T]: ...
    def shuffle(self, items: list[Any], /) -> None: ...


class Status(IntEnum):
    """Ordered: at equal incarnation the greater status wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


Order = tuple[int, int]
"""(incarnation, status): the age of a statement about a node. Incarnations are serial numbers
(sched/membership/serial.py)."""


def supersedes(order: Order, than: Order) -> bool:
    """Whether a statement with `order` is newer than one with `than`."""
    return order[1] > than[1] if order[0] == than[0] else newer(order[0], than[0])


@dataclass(frozen=True, slots=True)
class Member:
    """One node. `info` has what peers must know before they connect: model, block_size, root (hex), share ..."""

    node_id: str
    address: Address
    http: str = ""  # HOST:PORT of its API
    roles: tuple[str, ...] = ()
    incarnation: int = 0
    status: Status = Status.ALIVE
    info: dict[str, Any] = field(default_factory=dict)
    life: int = 0  # random per process: distinguishes a restarted node from its predecessor

    @property
    def order(self) -> Order:
        """(incarnation, status), to compare with `supersedes`."""
        return (self.incarnation, self.status)

    @property
    def share(self) -> int:
        """Bytes that the node contributes to the pooled store; 0 if missing or invalid."""
        share = self.info.get("share")
        return share if type(share) is int and 0 <= share < 1 << 63 else 0

    @property
    def cost(self) -> float:
        """Price of the node per hour (--node-cost); 1 if missing or invalid."""
        cost = self.info.get("cost")
        return float(cost) if isinstance(cost, int | float) and 0 <= cost <= MAX_COST else 1.0

    @property
    def site(self) -> str:
        """Its site (--site); '' if the cluster has one site, or if it is invalid."""
        site = self.info.get("site", "")
        return site if isinstance(site, str) and len(site) <= TEXT_BYTES else ""

    @property
    def place(self) -> tuple[str, ...]:
        """Where it is in the network, from the core down (--network-place); empty if missing or invalid."""
        place = self.info.get("place", "")
        if not isinstance(place, str) or len(place) > TEXT_BYTES:
            return ()
        return tuple(filter(None, place.split("/")))

    @property
    def here(self) -> bool:
        """Whether the node counts as a member: alive or suspected."""
        return self.status < Status.DEAD

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.node_id,
            "at": list(self.address),
            "http": self.http,
            "roles": list(self.roles),
            "inc": self.incarnation,
            "status": int(self.status),
            "info": self.info,
            "life": self.life,
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Member:
        """Raises KeyError, TypeError or ValueError for anything that `to_wire` cannot produce."""
        host, port = wire["at"]
        roles, info = wire["roles"], wire["info"]
        if not isinstance(info, dict) or not isinstance(roles, list):
            raise TypeError("member entry with fields of the wrong type")
        return cls(
            node_id=text(wire["id"]),
            address=(text(host), number(port, 16)),
            http=str(wire["http"]),
            roles=tuple(text(role) for role in roles),
            incarnation=number(wire["inc"], 32),
            status=Status(wire["status"]),
            info=info,
            life=number(wire["life"], 32),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A statement about a known node: suspected, dead or left."""

    node_id: str
    incarnation: int
    status: Status
    source: str  # node that issued the verdict

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.node_id, "inc": self.incarnation, "status": int(self.status), "by": self.source}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Verdict:
        return cls(text(wire["id"]), number(wire["inc"], 32), Status(wire["status"]), text(wire["by"]))


def text(value: Any) -> str:
    """Returns `value` if it is a printable name of 1 to TEXT_BYTES bytes; otherwise raises ValueError."""
    if (
        not isinstance(value, str)
        or not 0 < len(value.encode()) <= TEXT_BYTES
        or not value.isprintable()
        or '"' in value
        or "\\" in value
    ):
        raise ValueError(f"expected a printable name of 1 to {TEXT_BYTES} bytes without quotes, got {value!r:.80}")
    return value


def number(value: Any, bits: int) -> int:
    """Returns `value` if it is an unsigned integer of `bits` bits; otherwise raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"expected an unsigned integer of {bits} bits, got {value!r:.40}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Timing of the protocol. Formulas take n, the number of members including the node itself."""

    probe_period_s: float  # every node probes one other node per period
    probe_timeout_s: float  # wait for a direct answer; then helpers are asked
    indirect_probes: int
    gossip_period_s: float
    fanout: int  # nodes told per gossip period
    sync_period_s: float  # exchange of the whole member list with one node
    suspicion_mult: int
    suspicion_floor_s: float  # minimum suspicion time; must exceed the longest pause of a healthy node
    retransmit_mult: int
    state_period_s: float  # exchange of node records, up to 256 nodes
    state_fanout: int = 2  # number of partners per period, one after another
    digest_period_s: float = 1.0  # exchange of changes of cache digests, see sched/gossip/digest_exchange.py
    cell_nodes: int = 256  # a larger cluster is split into cells, see sched/gossip/cells.py
    cell_period_s: float = 0.5  # exchange of cell summaries
    confirmations: int = 3  # confirmations by others that shorten a suspicion to its minimum
    suspicion_max_mult: int = 4  # without confirmations, a suspicion is this many times as long
    dead_keep_s: float = 600.0  # how long dead nodes are remembered, contacted, and shielded from stale rumours

    def suspicion_s(self, n: int) -> float:
        """Seconds until a node that several others suspect is dead: mult * max(1, log10 n) * probe period."""
        by_size = self.suspicion_mult * max(1.0, math.log10(n)) * self.probe_period_s
        return max(self.suspicion_floor_s, by_size)

    def suspicion_max_s(self, n: int) -> float:
        """Seconds until a node that only one other suspects is dead."""
        return self.suspicion_max_mult * self.suspicion_s(n)

    def sync_s(self, n: int) -> float:
        """Seconds between comparisons of the member list with one node; one period longer per doubling of n above
        32."""
        return self.sync_period_s * (1 + max(0, math.ceil(math.log2(max(1, n) / 32))))

    def state_s(self, n: int) -> float:
        """Seconds between exchanges of records: shorter for few nodes, longer for many. This bounds the traffic,
        because every record goes to every node: at 1,024 nodes the busiest one sends 0.6 MB/s."""
        return self.state_period_s * (0.5 if n <= 16 else 1.0 if n <= 256 else 2.2)

    def retransmits(self, n: int) -> int:
        """Number of times that a node passes on a rumour: mult * ceil(log10(n + 1))."""
        return self.retransmit_mult * math.ceil(math.log10(n + 1))

    def spread_s(self, n: int) -> float:
        """Seconds until a rumour has reached all nodes: twice the log_(fanout + 1)(n) + 1 rounds without loss."""
        return 2 * self.gossip_period_s * (math.ceil(math.log(n, self.fanout + 1)) + 1)

    def detection_s(self, n: int) -> float:
        """Seconds until all nodes know of a crash.

        A node certainly probes the dead one within 2n - 3 periods (round robin in random order), and within 9 periods
        except in one case in e^9 = 8,000 (n - 1 probers hit it with probability 1 - 1/e per period). The probe fails
        one period later, the suspicion expires (before its maximum, because others nearly always confirm it), and the
        news spreads.
        """
        periods = min(2 * n - 3, 9) + 1
        longest = self.suspicion_max_s(n) if n - 2 >= self.confirmations else self.suspicion_s(n)
        return periods * self.probe_period_s + longest + self.probe_timeout_s + self.spread_s(n)


presets = {
    "local": Preset(
        probe_period_s=0.3,
        probe_timeout_s=0.15,
        indirect_probes=2,
        gossip_period_s=0.1,
        fanout=3,
        sync_period_s=5.0,
        suspicion_mult=4,
        suspicion_floor_s=1.2,
        retransmit_mult=4,
        state_period_s=0.1,
    ),
    "lan": Preset(
        probe_period_s=0.4,
        probe_timeout_s=0.2,
        indirect_probes=3,
        gossip_period_s=0.1,
        fanout=3,
        sync_period_s=15.0,
        suspicion_mult=3,
        suspicion_floor_s=3.0,
        retransmit_mult=4,
        state_period_s=0.1,
    ),
    "wan": Preset(
        probe_period_s=5.0,
        probe_timeout_s=2.0,
        indirect_probes=3,
        gossip_period_s=0.5,
        fanout=4,
        sync_period_s=60.0,
        suspicion_mult=6,
        suspicion_floor_s=30.0,
        retransmit_mult=4,
        state_period_s=1.0,
    ),
}

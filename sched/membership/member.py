"""A member of the cluster as gossip tells it, and the timing presets of the protocol.

What is known of one node is ordered by (incarnation, status): of two statements the newer one holds, so statements may
arrive late, twice and in any order. Only the node itself raises its incarnation; that is how it refutes a false
suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from sched.membership.serial import newer

Address = tuple[str, int]
"""Host and port: TCP for control and KV, UDP for gossip, the same number."""

TEXT_BYTES = 64
"""Longest node id, role or host."""

LAST_WORDS = 2
"""How often a suspect is asked itself, a probe timeout apart, before it is given up."""

T = TypeVar("T")


class Rng(Protocol):
    """The part of random.Random that the cores use; always an argument, so that a run can be replayed."""

    def random(self) -> float: ...
    def getrandbits(self, bits: int, /) -> int: ...
    def choice(self, items: Sequence[T], /) -> T: ...
    def sample(self, items: Sequence[T], k: int, /) -> list[T]: ...
    def shuffle(self, items: list[Any], /) -> None: ...


class Status(IntEnum):
    """Ordered: at equal incarnation the greater status holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


Order = tuple[int, int]
"""(incarnation, status): the age of a statement about a node. Incarnations are serial numbers
(sched/membership/serial.py)."""


def supersedes(order: Order, than: Order) -> bool:
    """A statement of `order` is news to somebody who has heard `than`."""
    return order[1] > than[1] if order[0] == than[0] else newer(order[0], than[0])


@dataclass(frozen=True, slots=True)
class Member:
    """One node. `info` is what peers must know before they talk to it: model, block_size, root (hex), share ..."""

    node_id: str
    address: Address
    http: str = ""  # HOST:PORT of its API
    roles: tuple[str, ...] = ()
    incarnation: int = 0
    status: Status = Status.ALIVE
    info: dict[str, Any] = field(default_factory=dict)
    life: int = 0  # random per process: tells a restarted node from its former self

    @property
    def order(self) -> Order:
        """`supersedes` says which of two is the newer."""
        return (self.incarnation, self.status)

    @property
    def share(self) -> int:
        """Bytes of the pooled store that it gives; 0 when it says nothing that can be read."""
        share = self.info.get("share")
        return share if type(share) is int and 0 <= share < 1 << 63 else 0

    @property
    def here(self) -> bool:
        """Counts as a member: alive, or suspected and not yet given up."""
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
        """Raises KeyError, TypeError or ValueError for anything that `to_wire` cannot have written."""
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
    """A statement about a node whose entry the reader already has: suspected, dead, left."""

    node_id: str
    incarnation: int
    status: Status
    source: str  # node that found out

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.node_id, "inc": self.incarnation, "status": int(self.status), "by": self.source}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Verdict:
        return cls(text(wire["id"]), number(wire["inc"], 32), Status(wire["status"]), text(wire["by"]))


def text(value: Any) -> str:
    """`value` if it is a name: printable, not empty, at most TEXT_BYTES long; raises ValueError."""
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
    """`value` if it is an unsigned integer of so many bits; raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"expected an unsigned integer of {bits} bits, got {value!r:.40}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Timing of the protocol. Formulas take n, the number of members including the node itself."""

    probe_period_s: float  # every node probes one other per period
    probe_timeout_s: float  # direct answer expected by then; afterwards others are asked to try
    indirect_probes: int
    gossip_period_s: float
    fanout: int  # nodes told per gossip period
    sync_period_s: float  # exchange of the whole member list with one node
    suspicion_mult: int
    suspicion_floor_s: float  # longer than a node may stand still without being taken for dead
    retransmit_mult: int
    state_period_s: float  # exchange of node records, up to 256 nodes
    state_fanout: int = 2  # with so many others, one after the other
    digest_period_s: float = 1.0  # changes of the cache digests are told, see sched/gossip/digest_exchange.py
    cell_nodes: int = 256  # above that the cluster is cut into cells, see sched/gossip/cells.py
    cell_period_s: float = 0.5  # summaries of cells are told
    confirmations: int = 3  # of a suspicion by others, after which it is as short as it gets
    suspicion_max_mult: int = 4  # without any, it is so many times as long
    dead_keep_s: float = 600.0  # how long the dead are remembered, called upon, and shielded from stale rumours

    def suspicion_s(self, n: int) -> float:
        """How long a node has to answer that several others suspect: mult * max(1, log10 n) * probe period."""
        by_size = self.suspicion_mult * max(1.0, math.log10(n)) * self.probe_period_s
        return max(self.suspicion_floor_s, by_size)

    def suspicion_max_s(self, n: int) -> float:
        """How long a node has to answer that only one other suspects."""
        return self.suspicion_max_mult * self.suspicion_s(n)

    def sync_s(self, n: int) -> float:
        """Time between comparisons of member lists, each with one node: longer by one period per doubling above 32."""
        return self.sync_period_s * (1 + max(0, math.ceil(math.log2(max(1, n) / 32))))

    def state_s(self, n: int) -> float:
        """Time between exchanges of records: halved for a few nodes, doubled and more for many, which bounds the
        traffic: every record goes to every node, so at 1,024 nodes that is 0.6 MB/s sent by the busiest."""
        return self.state_period_s * (0.5 if n <= 16 else 1.0 if n <= 256 else 2.2)

    def retransmits(self, n: int) -> int:
        """How often one node passes on one rumour: mult * ceil(log10(n + 1))."""
        return self.retransmit_mult * math.ceil(math.log10(n + 1))

    def spread_s(self, n: int) -> float:
        """A rumour has reached everybody: twice the log_(fanout + 1)(n) + 1 rounds of a loss-free network."""
        return 2 * self.gossip_period_s * (math.ceil(math.log(n, self.fanout + 1)) + 1)

    def detection_s(self, n: int) -> float:
        """A crash is known everywhere by then.

        Somebody probes the dead node within 2n - 3 periods for certain (round robin in random order), and within 9
        but for one case in e^9 = 8,000 (n - 1 probers hit it with probability 1 - 1/e per period); that probe fails
        one period later, the suspicion runs out (sooner than its longest time if others confirm it, as they nearly
        always do), the news spreads.
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

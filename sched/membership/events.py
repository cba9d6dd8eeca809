"""Events that gossip cores receive and effects that they return: the complete interface to a driver.

A driver (the asyncio shell of net/gossip/driver.py, or a simulator) passes events with the time of its own steady clock
and executes the effects in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from sched.membership.member import Address, Member

# --- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Datagram:
    source: Address
    payload: bytes


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the cluster through the node at `address`; ends in Joined or Refused, retried until GiveUp."""

    address: Address


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop trying to join."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Another source (a broken connection) reports that the node may be dead."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Adds members known from another source, such as a simulation that starts with a cluster; does not spread them."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell all nodes that this node leaves; send it twice in case of packet loss."""


Event = Tick | Datagram | Join | GiveUp | Suspect | Learn | Leave

# --- effects


@dataclass(frozen=True, slots=True)
class SendPacket:
    address: Address
    payload: bytes  # at most packet.PACKET_BYTES


@dataclass(frozen=True, slots=True)
class MemberUp:
    member: Member


@dataclass(frozen=True, slots=True)
class MemberDown:
    member: Member
    reason: str

    @property
    def node_id(self) -> str:
        return self.member.node_id


@dataclass(frozen=True, slots=True)
class MemberSuspected:
    """The node may be dead, so send it no new work. It refutes the suspicion, or MemberDown follows."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The member list of the cluster is complete."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A join failed; both the joiner and the node that refused it see this with the same reason."""

    node_id: str  # the joiner
    reason: str


Effect = SendPacket | MemberUp | MemberDown | MemberSuspected | Joined | Refused

"""What happens to the gossip cores, and what they want done: the whole surface between them and a driver.

A driver (the asyncio shell of net/gossip/driver.py, or a simulator) feeds events with its own steady clock and carries
out the effects in order.
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
    """Something else (a broken connection) says that the node may be dead."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Members known from elsewhere, as in a simulation that starts with a cluster; they are taken in, not passed on."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell everybody that this node goes; repeat it once against packet loss."""


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
    """It may be dead: nothing new should go there. It refutes, or a MemberDown follows."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The member list of the cluster is complete."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A join failed; both the joiner and the node that refused it see this with the same reason."""

    node_id: str  # of the joiner
    reason: str


Effect = SendPacket | MemberUp | MemberDown | MemberSuspected | Joined | Refused

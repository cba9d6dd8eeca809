"""Joining: a process of another host becomes a rank of a node: what both say before the first message. Pure.

    rank -> node   {"join": Joining}
    node -> rank   {"welcome": Welcome}, or {"refused": why, "again": whether to ask again}. Both say what they have for
                   RDMA, and the node chooses the device of the rank
    rank -> node   {"want": [layer, slot]} for each expert that it cannot read itself
    node -> rank   {"expert": [layer, slot], "sum": checksum} + the weights: the parts of engine/experts/share.py
    rank -> node   {"loading": true} now and then, while it progresses; at last {"ready": true}, or {"failed": why}
                   "near": true with the former: the rank has connected to the node's socket (net/rounds/near.py).
                   Otherwise "side" or "tcp": what follows about RDMA (net/rounds/rdma/meeting.py)

Then messages and answers follow, and what the two say at the end (net/rounds/remote_desk.py, near_desk.py, or
rdma/rdma_desk.py).

A node without experts of its own shares its ranks with other nodes: their processes have a number from the start, the
same for all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import __version__
from engine.experts.placing.placement import Placement
from engine.experts.plan import Duty, Plan
from net.rounds.rdma.offer import NO_RDMA, Offer, why_not

SILENCE_S = 10.0
"""A connection on which nothing comes for this long has ended: a rank beats every 10 ms, also while it has no work."""
LOADING_S = 180.0
"""The same while a rank loads."""
VERSION = f"{__version__}/6"
"""The second number counts changes of what is said here and of the messages."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A process that would like to be a rank. `instance`: the same for all connections of a process to one
    address."""

    version: str
    instance: str
    fingerprint: str = ""  # of the model it has; "": it gets the weights from the node
    rank: int = -1  # that it was, or that it is
    shared: bool = False  # it answers several nodes, as this rank and no other
    boot: str = ""  # of its host; "": it shares no memory
    rdma: Offer = NO_RDMA
    name: str = ""  # that the one who started it gave it


@dataclass(frozen=True, slots=True)
class Welcome:
    """What it is to be."""

    rank: int
    fingerprint: str
    plan: Plan
    placement: Placement
    near: str = ""  # path of a socket where a process of the same host gets memory
    device: str = ""  # of its host, for RDMA; "": messages go over TCP
    why_tcp: str = ""
    only_near: str = ""  # why it is refused if it does not reach `near`

    @property
    def added(self) -> bool:
        """Whether the node can do without this rank."""
        return self.rank >= self.plan.least

    @property
    def duty(self) -> Duty:
        return Duty(self.rank, self.plan, self.placement)


def refusal(joining: Joining, fingerprint: str, plan: Plan, rdma: Offer = NO_RDMA, near: bool = False) -> str | None:
    """Why a process cannot be a rank of the node with this model and plan, and this for RDMA; None if it can. `near`:
    the two may share memory, and then need no other way."""
    if joining.version != VERSION:
        return f"it runs version {joining.version}, the node runs {VERSION}: run the same release on all hosts"
    if joining.fingerprint not in ("", fingerprint):
        return "its --model is another one than the node's: give the same, or none to get the weights from the node"
    if plan.shared and not joining.shared:
        return f"the node shares its ranks with others, so each has its number: give --rank, of 0 to {plan.ranks - 1}"
    if joining.shared and not plan.shared:
        return "the node has experts itself, and does not share its ranks: leave out --rank"
    if joining.shared and not 0 <= joining.rank < plan.ranks:
        return f"--rank {joining.rank}: the ranks of --expert-parallel-size {plan.ranks} are 0 to {plan.ranks - 1}"
    return None if near else lacks_rdma(rdma, joining.rdma)


def lacks_rdma(node: Offer, rank: Offer) -> str | None:
    """Why the two have no way to each other, if they share no memory; None if they have one."""
    if not (node.only or rank.only) or not (why := why_not(node, rank)):
        return None
    who = "the node" if node.only else "it"
    return f"{who} was started with --transport rdma, and {why}; give --transport auto or tcp"

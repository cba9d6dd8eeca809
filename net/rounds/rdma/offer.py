"""The RDMA devices that each of two processes has for messages, and what follows from both. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from net.transfer.common.topology import pairs


@dataclass(frozen=True, slots=True)
class Offer:
    """What a process says of itself."""

    rails: dict[str, int] = field(default_factory=dict)  # rail numbers of its devices
    refused: str = ""  # why it has none
    only: bool = False  # it takes no other way: --transport rdma

    @property
    def unusable(self) -> str:
        """Why this process cannot start; empty if it can."""
        return f"--transport rdma: {self.refused}; give --transport auto or tcp" if self.only and self.refused else ""


NO_RDMA = Offer(refused="it has none")


def why_not(asking: Offer, answering: Offer) -> str:
    """Why messages between the two go over TCP; empty if RDMA is a way."""
    if asking.refused:
        return f"the node: {asking.refused}"
    if answering.refused:
        return f"the rank: {answering.refused}"
    if not pairs(asking.rails, answering.rails):
        return "the node and the rank share no rail number: see --rdma-devices and --topology-file"
    return ""


def devices(asking: Offer, answering: Offer, number: int) -> tuple[str, str]:
    """Those of the asking and of the answering process: the `number`-th pair takes the next rail. `why_not` is
    empty."""
    joined = pairs(asking.rails, answering.rails)
    return joined[number % len(joined)]

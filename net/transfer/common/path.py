"""The path to a peer for transfers, and the result of a transfer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from net.transfer.common.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Path:
    """The transport to a peer."""

    transport: str
    reason: str
    refused: dict[str, str]  # better transports and why they do not work
    epoch: str = ""  # the peer's identifier of the time since it last lost us: see PathFinder.epoch_of

    def why(self) -> str:
        """One line: the reason for this transport and against the better ones."""
        return "; ".join([self.reason, *(f"no {name}: {reason}" for name, reason in self.refused.items())])


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Completion:
    """The result of one submission."""

    nbytes: int
    seconds: float
    transport: str


@dataclass(slots=True)
class Reached:
    """A peer of transfers."""

    traffic: Traffic = field(default_factory=Traffic)
    path: Path | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


LOCAL = Path("local", "the peer is this node", {})

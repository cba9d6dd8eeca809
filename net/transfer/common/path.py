"""The path to a peer for transfers, and the result of a transfer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from net.transfer.common.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes get to a peer."""

    transport: str
    reason: str
    refused: dict[str, str]  # the better transports, and why they cannot be used
    epoch: str = ""  # the peer's name for the time since it last lost us: see PathFinder.epoch_of

    def why(self) -> str:
        """One line: how, and why not better."""
        return "; ".join([self.reason, *(f"no {name}: {reason}" for name, reason in self.refused.items())])


@dataclass(slots=True)  # not frozen: making a frozen one takes three times as long
class Completion:
    """What one submission did."""

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

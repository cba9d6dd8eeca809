"""What calls of the store return and raise."""

from __future__ import annotations

from dataclasses import dataclass, field


class StoreError(Exception):
    """A value could not be stored; the message says why."""


class NoRoom(StoreError):
    """Every home that could have taken it is full of blocks in use or not yet written to SSD."""


class Unreachable(StoreError):
    """No home that could have taken it answers."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """The leading run that arrived whole, and where it came from: blocks by home, by transport, by tier."""

    blocks: int
    nbytes: int
    sources: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)

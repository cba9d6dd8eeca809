"""The results and errors of calls to the store."""

from __future__ import annotations

from dataclasses import dataclass, field


class StoreError(Exception):
    """A value could not be stored; the message says why."""


class NoRoom(StoreError):
    """Every home that could have taken it is full of blocks that are in use, pinned, or not yet written to SSD; or it
    keeps as many pinned values as it may."""


class NotDurable(StoreError):
    """It is in the pool, but no home of it has it safely on SSD; the message says why."""


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


@dataclass(frozen=True, slots=True)
class LeadingRun:
    """The leading run of some keys that the pool has now, and what of it has to be read from SSD first."""

    blocks: int
    dram_blocks: int = 0  # in front of the first that lies on SSD only
    ssd_blocks: int = 0
    ssd_s: float = 0.0  # until the last of their homes has them in DRAM, as those measure it and have to read before

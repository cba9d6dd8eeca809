"""The results and errors of calls to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class StoreError(Exception):
    """A value could not be stored; the message says why."""


class NoRoom(StoreError):
    """Every possible home is full of blocks that are in use, pinned, or not yet written to SSD; or it holds as many
    pinned values as it may."""


class OverQuota(NoRoom):
    """The tenant of a value has as much in a home as it may have (--tenants)."""


class NotDurable(StoreError):
    """The value is in the pool, but none of its homes has it synced on SSD; the message says why."""


class Unreachable(StoreError):
    """No possible home answers."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """The leading run that arrived intact, and its origin: blocks by home, by transport, by tier."""

    blocks: int
    nbytes: int
    sources: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # bytes, by position, of blocks that do not fill a slot
    saved_bytes: int = 0  # by which rounded blocks were shorter than exact ones


@dataclass(frozen=True, slots=True)
class LeadingRun:
    """The leading run of some keys that the pool has now, and how much of it must first be read from SSD."""

    blocks: int
    dram_blocks: int = 0  # before the first block that is only on SSD
    ssd_blocks: int = 0
    ssd_s: float = 0.0  # until the last of the homes has them in DRAM, as the homes estimate it with their queued reads

    def up_to(self, ends: Sequence[bool]) -> LeadingRun:
        """The longest part of it that ends at one of its blocks with ends[block], and the longest of what is in DRAM;
        the wait for SSD stays that of the whole run."""
        counts = [place + 1 for place, is_end in enumerate(ends[: self.blocks]) if is_end]
        blocks = max(counts, default=0)
        dram_blocks = max((count for count in counts if count <= self.dram_blocks), default=0)
        if blocks == dram_blocks:
            return LeadingRun(blocks, dram_blocks)
        return LeadingRun(blocks, dram_blocks, self.ssd_blocks, self.ssd_s)

"""Offer: the facts that a writer sends about blocks in addition to their keys (cache/messages.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from net.bodies import BodyError

UINT32_END = 1 << 32


def at_least(least: int, values: Sequence[int], what: str) -> None:
    """Raises ValueError if one of `values` is less than `least`."""
    if values and min(values) < least:
        raise ValueError(f"{what} of {min(values)}")


@dataclass(frozen=True, slots=True)
class Contents:
    """What distinguishes the copies of one key."""

    checksums: Sequence[int]
    lengths: Sequence[int]  # bytes

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")
        at_least(1, self.lengths, "a length")
        if len(self.checksums) != len(self.lengths) or (self.lengths and max(self.lengths) >= UINT32_END):
            raise ValueError(f"{len(self.checksums)} checksums and {len(self.lengths)} lengths tell no contents")


@dataclass(slots=True)  # not frozen, which would take three times as long: each put creates two
class BlockFacts:
    """cache.pool.policy.Facts of every block; a single entry holds for all."""

    positions: Sequence[int]
    costs_s: Sequence[float]
    service_classes: Sequence[str]

    def __post_init__(self) -> None:
        at_least(0, self.positions, "a position")
        if not len(self.positions) == len(self.costs_s) == len(self.service_classes):
            raise ValueError(f"{len(self.positions)} positions have other facts")


@dataclass(frozen=True, slots=True)
class Offer:
    """A writer's facts about blocks that it asks a home to store, in addition to their keys."""

    divert: bool = False  # the writer sends blocks without room to the next member
    owner: str = ""  # the home that the addressed node replaces
    decide: bool = False  # this home decides: no other home was asked before
    repair: bool = False  # they are copies of blocks on another node
    kept: Sequence[bool] = ()  # of a repair: which of them must never be evicted
    contents: Contents | None = None  # of copies
    facts: BlockFacts | None = None
    ttl_ms: int = 0  # they are copies from another site, which leave when nobody reads them for so long; 0 = they stay

    def check(self, count: int) -> None:
        """Raises BodyError unless it describes `count` blocks."""
        if self.ttl_ms < 0:
            raise BodyError(f"a time to live of {self.ttl_ms} ms")
        if self.contents is not None and len(self.contents.checksums) != count:
            raise BodyError(f"contents of {len(self.contents.checksums)} blocks instead of {count}")
        if self.facts is not None and len(self.facts.positions) not in (1, count):
            raise BodyError(f"facts of {len(self.facts.positions)} blocks instead of {count}")
        if self.kept and len(self.kept) != count:
            raise BodyError(f"{len(self.kept)} marks of kept blocks instead of {count}")


PLAIN_OFFER = Offer()

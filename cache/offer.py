"""Offer: what a writer says of blocks in addition to their keys, as it travels (cache/messages.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from net.bodies import BodyError

UINT32_END = 1 << 32


def at_least(least: int, values: Sequence[int], what: str) -> None:
    """Raises ValueError for a smaller one."""
    if values and min(values) < least:
        raise ValueError(f"{what} of {min(values)}")


@dataclass(frozen=True, slots=True)
class Contents:
    """What tells copies of one key apart."""

    checksums: Sequence[int]
    lengths: Sequence[int]  # bytes

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")
        at_least(1, self.lengths, "a length")
        if len(self.checksums) != len(self.lengths) or (self.lengths and max(self.lengths) >= UINT32_END):
            raise ValueError(f"{len(self.checksums)} checksums and {len(self.lengths)} lengths tell no contents")


@dataclass(slots=True)  # not frozen, which takes three times as long: there are two for each put
class BlockFacts:
    """cache.pool.policy.Facts of every block, or of one for all."""

    positions: Sequence[int]
    costs_s: Sequence[float]
    service_classes: Sequence[str]

    def __post_init__(self) -> None:
        at_least(0, self.positions, "a position")
        if not len(self.positions) == len(self.costs_s) == len(self.service_classes):
            raise ValueError(f"{len(self.positions)} positions have other facts")


@dataclass(frozen=True, slots=True)
class Offer:
    """Of blocks that a home is asked to take, in addition to their keys."""

    divert: bool = False  # the writer takes those that there is no room for to the next member
    owner: str = ""  # the home that the asked one stands in for
    decide: bool = False  # no other home was asked to take them
    repair: bool = False  # they are copies of what is elsewhere
    kept: Sequence[bool] = ()  # of a repair: which of them are never evicted there
    contents: Contents | None = None  # of copies
    facts: BlockFacts | None = None

    def check(self, count: int) -> None:
        """Raises BodyError when it is not about `count` blocks."""
        if self.contents is not None and len(self.contents.checksums) != count:
            raise BodyError(f"contents of {len(self.contents.checksums)} blocks instead of {count}")
        if self.facts is not None and len(self.facts.positions) not in (1, count):
            raise BodyError(f"facts of {len(self.facts.positions)} blocks instead of {count}")
        if self.kept and len(self.kept) != count:
            raise BodyError(f"{len(self.kept)} marks of kept blocks instead of {count}")


PLAIN_OFFER = Offer()

"""The bulk calls for pooled blocks: their kinds and bodies. Pure.

net/transfer/tcp/bulk_call.py describes bulk calls. The keys of the blocks are one string of bytes, 16 for each. The
lists, and the answer to PUT, Taken, are those of cache/messages.py. The bodies are not frozen, because creating a
frozen one takes two to four times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.answer_checks import all_about, count_found, one_each
from cache.offer import PLAIN_OFFER, Offer, at_least

GET = "store.get"  # send these blocks
PUT = "store.put"  # store these blocks


@dataclass(slots=True)
class Get:
    """GET."""

    keys: bytes
    leading: bool = False


@dataclass(slots=True)
class Got:
    """The answer to GET, in front of the blocks. Like Pinned, but it leaves out the values for blocks that are all in
    DRAM."""

    checksums: Sequence[int]
    slots: Sequence[int] | None = None  # None: every block is there; 0 for each that is
    lengths: Sequence[int] = ()
    tiers: Sequence[str] = ()
    more: bool = False
    hot: Sequence[tuple[int, int]] = ()

    def check(self, asked: int) -> Got:
        """Returns self. Raises RemoteError unless it answers for `asked` keys."""
        found = asked if self.slots is None else count_found(self.slots, asked)
        one_each(found, self.checksums, self.lengths or self.checksums, self.tiers or self.checksums)
        all_about([position for position, _ in self.hot], asked)
        return self


@dataclass(slots=True)
class Put:
    """PUT, in front of the blocks."""

    keys: bytes
    lengths: Sequence[int] = ()
    offer: Offer = PLAIN_OFFER
    checksums: Sequence[int] = ()  # if they are known before the blocks are sent: then no PutEnd follows

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")


@dataclass(slots=True)
class PutEnd:
    """PUT, behind the blocks."""

    checksums: Sequence[int]

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")

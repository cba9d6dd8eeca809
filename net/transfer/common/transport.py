"""The interface of a transport. A new one is a file with such a class and an entry in
`net.transfer.engine.transports`."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from net.channel.links import Links
from net.transfer.common.holds import Hold
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span

REPAIR = -1
BULK = 0
URGENT = 1
"""Priorities of a submission, by deadline. An urgent one does not wait behind bulk to the same peer: layers of a
request that will decode soon overtake prefixes that are fetched and blocks that are published. These overtake repairs,
blocks on their way to where they belong, for which nobody waits."""


class Op(Enum):
    """Direction as the submitter sees it."""

    READ = "read"  # remote -> local
    WRITE = "write"  # local -> remote


class Unusable(Exception):
    """This transport cannot reach the peer; the text, which Path.refused will contain, says why."""


class Transport(Protocol):
    """One way of moving bytes between registered regions of two nodes. Both ends run one; methods are called on the
    event loop. A peer must be open before anything is submitted to it."""

    name: str

    def __init__(self, links: Links, regions: Mapping[str, Region]) -> None:
        """`regions` is the engine's own table: peers may read and write the regions that are in it now."""

    def offer(self) -> dict[str, Any]:
        """JSON that a peer needs to reach this node, or {"refused": reason}. Called for each peer that opens a path."""

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        """Prepare submissions to the peer that made `offer`; returns one line that describes the path. Idempotent.
        Raises Unusable (the engine tries the next transport) or PeerLost."""

    def is_open(self, peer_id: str) -> bool:
        """Whether `submit` may be called."""

    def submit(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Move the bytes; the local side of the spans is inside `local`, the remote side is not checked yet. Adds
        arrived pieces to `landed` until it ends. If cancelled, it ends only when no byte of it moves any more. Raises
        TransferError, PeerLost."""

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        """net.transfer.common.rails.Rail.row of every rail to the peer; empty for a transport without rails. A transfer
        is striped over the rails of one "lane"; rows without a lane are in the same one."""

    def withdraw(self, name: str) -> None:
        """The region is no longer in `regions`; stop its running transfers."""

    def drop(self, peer_id: str) -> None:
        """The peer is lost or has closed. Idempotent."""

    async def fence(self, peer_id: str) -> None:
        """Return when no submission that the peer made before it was dropped can touch local memory any more."""

    async def close(self) -> None:
        """Finish or stop everything in good order."""


@runtime_checkable
class Atomics(Protocol):
    """A transport that can also change a word of a peer's memory atomically."""

    async def fetch_add(self, peer_id: str, remote: str, offset: int, add: int) -> int:
        """Add to the 64-bit word at `offset` (a multiple of 8) of the region `remote`; returns the old value. Raises
        TransferError and PeerLost; the add may have happened."""


@runtime_checkable
class Carded(Protocol):
    """A transport over network cards, which are near some memory and far from other memory."""

    def near(self, region: Region) -> list[str]:
        """The cards in use near the region; empty before the first peer has asked."""


@runtime_checkable
class Pinning(Protocol):
    """A transport that pins the pages of a region before it moves its bytes."""

    async def pin(self, region: Region) -> None:
        """Do it now, and not at the first transfer. Raises Unusable with the reason."""


@runtime_checkable
class Mapped(Protocol):
    """A transport that maps the memory of its peers into this process."""

    def maps(self, peer_id: str) -> bool:
        """`is_open` as the event loop last saw it, without a look for notices of the peer. Any thread may ask."""

    def hold(self, peer_id: str) -> Hold | None:
        """Take this before writing into memory of the peer that is mapped; None if the peer is gone. Any thread may
        call."""

    async def mapped(self, peer_id: str, remote: str) -> Region:
        """The peer's region, for reading; for writing only with a `hold`. Raises TransferError, PeerLost."""

"""The interface of a transport. A new one is a file with such a class and an entry in
`net.transfer.engine.transports`."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from net.channel.links import Links
from net.transfer.common.landed import Landed
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span

BULK = 0
URGENT = 1
"""Priorities of a submission. An urgent one does not wait behind bulk to the same peer: layers of a request that
decodes soon go before blocks that are published."""


class Op(Enum):
    """Direction as the submitter sees it."""

    READ = "read"  # remote -> local
    WRITE = "write"  # local -> remote


class Unusable(Exception):
    """This transport cannot reach the peer; the text says why and ends up in Path.refused."""


class Transport(Protocol):
    """One way of moving bytes between registered regions of two nodes. Both ends run one; methods are called on the
    event loop. A peer must be open before anything is submitted to it."""

    name: str

    def __init__(self, links: Links, regions: Mapping[str, Region]) -> None:
        """`regions` is the engine's own table: what is in it now may be read and written by peers."""

    def offer(self) -> dict[str, Any]:
        """JSON that a peer needs to reach this node, or {"refused": reason}. Called for every peer that opens."""

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        """Get ready to submit to the peer that made `offer`; returns one line on how. Idempotent. Raises Unusable
        (the engine tries the next transport) or PeerLost."""

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
        landed: Landed | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Move the bytes; the local side of the spans is inside `local`, the remote side is not checked yet. `landed`
        hears of the pieces that have arrived, until this ends. When cancelled it first makes sure that no byte of it
        moves any more. Raises TransferError, PeerLost."""

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        """net.transfer.common.rails.Rail.row of every rail to the peer; empty for a transport that has but one way. A
        transfer is striped over the rails of one "lane"; rows that name none are in the same."""

    def withdraw(self, name: str) -> None:
        """The region is no longer in `regions`; stop serving what is under way for it."""

    def drop(self, peer_id: str) -> None:
        """The peer is lost or has closed. Idempotent."""

    async def fence(self, peer_id: str) -> None:
        """Return when nothing the peer submitted before it was dropped can touch local memory any more."""

    async def close(self) -> None:
        """Finish or stop everything in good order."""


@runtime_checkable
class Atomics(Protocol):
    """A transport that can also change a word of a peer's memory in one step."""

    async def fetch_add(self, peer_id: str, remote: str, offset: int, add: int) -> int:
        """Add to the 64-bit word at `offset` (a multiple of 8) of the region `remote`; returns what it was. Raises
        TransferError, also when it may have happened, and PeerLost."""


@runtime_checkable
class Carded(Protocol):
    """A transport over network cards, which are near some memory and far from other."""

    def near(self, region: Region) -> list[str]:
        """The cards in use near the region; none before the first peer has asked."""


@runtime_checkable
class Mapped(Protocol):
    """A transport that has the memory of its peers in this process."""

    async def mapped(self, peer_id: str, remote: str) -> Region:
        """The peer's region, to be read. Raises TransferError, PeerLost."""

"""The transfer engine: moves spans of bytes between registered regions of two nodes.

Every pair of nodes uses the first transport of `order` that works between them; `Path` says which and why not the
better ones. The submitter names both sides; the remote process takes no decision and, over shared memory, no part.

When memory may be reused
-------------------------
`submit` has returned, or raised anything but PeerLost: no byte of it moves any more, on either side. It may be
reused, or given back to its owner, at once. (A cancelled or timed-out WRITE over TCP waits for the peer to confirm
that; a peer that does not confirm is dropped.) A WRITE that did not complete may have landed in part.

`submit` has raised PeerLost, or the peer was reported lost while it ran: the local side may be reused at once. The
remote side may not, because a late byte may still land. The owner of that memory is told by its own `on_lost`; it
awaits `fence(peer_id)` and only then reuses slots the lost peer could have been writing. Until a WRITE completes or
its writer is fenced, the owner keeps its slots held; a deadline alone is no reason to reuse them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from net.channel import Channel
from net.copying import Copier, Copy
from net.errors import PeerLost, RemoteError, TransferError
from net.memory import Region
from net.rdma.transport import Rdma
from net.shm import Shm
from net.spans import Span, check, merged
from net.tcp import Tcp
from net.transport import Op, Transport, Unusable

__all__ = ["Completion", "Op", "Path", "PeerLost", "TransferEngine", "TransferError", "transports"]

transports: dict[str, Callable[..., Transport]] = {"shm": Shm, "rdma": Rdma, "tcp": Tcp}
"""The registry of transports, best first."""

OPEN_S = 10.0  # for the peer to answer which transports it offers


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes get to a peer."""

    transport: str
    reason: str
    refused: dict[str, str]  # the better transports, and why they cannot be used


@dataclass(frozen=True, slots=True)
class Completion:
    """What one submission did."""

    nbytes: int
    seconds: float
    transport: str


@dataclass(slots=True)
class _Traffic:
    """Sums over the submissions to one peer."""

    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    failures: int = 0
    path: Path | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


_LOCAL = Path("local", "the peer is this node", {})


class TransferEngine:
    """One per node, beside its channel. Make it before whatever else listens to `channel.on_lost`: TCP writes of a
    lost peer are then cut off before the others hear of the loss."""

    def __init__(
        self,
        channel: Channel,
        order: Sequence[str] = ("shm", "tcp"),
        options: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """`order`: the transports to try, best first, which are also those offered to peers. `options`: keyword
        arguments of their constructors, by name."""
        if not order or any(name not in transports for name in order):
            raise ValueError(f"transports must be some of {', '.join(transports)}, got {list(order)}")
        self._channel = channel
        self._regions: dict[str, Region] = {}
        given = options or {}
        self._transports = {
            name: transports[name](channel.links, self._regions, **given.get(name, {})) for name in order
        }
        self._traffic: dict[str, _Traffic] = {}
        self._copier = Copier()
        self._closed = False
        channel.handle("transfer.open", self._offer)
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    def register(self, region: Region) -> None:
        """Peers may read and write the region from now on. Raises ValueError when the name is taken."""
        if region.name in self._regions:
            raise ValueError(f"a region {region.name!r} is registered already: unregister it first")
        self._regions[region.name] = region

    def unregister(self, name: str) -> None:
        """Refuse the region from now on; what is under way over TCP is stopped. A peer on this host that is copying
        finishes that copy, in pages it still has mapped. Raises KeyError."""
        del self._regions[name]
        for transport in self._transports.values():
            transport.withdraw(name)

    async def open(self, peer_id: str) -> Path:
        """The path to the peer, found on the first call and after every loss. Raises PeerLost, PeerRefused,
        TransferError when no transport works, TimeoutError."""
        if self._closed:
            raise TransferError("the transfer engine is closed")
        if peer_id == self._channel.node_id:
            return _LOCAL
        if (path := self.path_of(peer_id)) is not None:
            return path
        traffic = self._of(peer_id)
        async with traffic.opening:
            if (path := self.path_of(peer_id)) is None:
                path = traffic.path = await self._find(peer_id)
        return path

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: str,
        remote: str,
        spans: Sequence[tuple[int, int, int]],
        timeout_s: float = 30.0,
    ) -> Completion:
        """Move `spans`, each (local offset, remote offset, length), between the region `local` here and `remote`
        there. Spans of one submission should not overlap; they land in any order. A WRITE has landed when this
        returns. Raises TransferError, PeerLost, PeerRefused, TimeoutError: see the module for what may be reused
        when."""
        started = time.perf_counter()  # uvloop caches loop.time() per turn
        traffic = self._of(peer_id)
        try:
            region = self._region(local)
            moves, nbytes = merged(spans, local, region.nbytes)
            async with asyncio.timeout(timeout_s):
                name = await self._move(peer_id, op, region, remote, moves, nbytes)
        except TimeoutError:
            traffic.failures += 1
            if traffic.path is not None and self.path_of(peer_id) is None:
                raise PeerLost(f"lost {peer_id!r} during a transfer: {self._channel.links.why_lost(peer_id)}") from None
            raise TimeoutError(f"{op.value} of {local!r} with {peer_id!r} not done within {timeout_s:g} s") from None
        except BaseException:
            traffic.failures += 1
            raise
        seconds = time.perf_counter() - started
        traffic.seconds += seconds
        if op is Op.READ:
            traffic.bytes_read += nbytes
        else:
            traffic.bytes_written += nbytes
        return Completion(nbytes, seconds, name)

    async def fence(self, peer_id: str, timeout_s: float = 10.0) -> None:
        """For the owner of memory, once `on_lost` has named the peer: return when no byte of that peer's earlier
        WRITEs can land here any more. Raises TimeoutError: then the slots stay held."""
        try:
            async with asyncio.timeout(timeout_s):
                for transport in self._transports.values():
                    await transport.fence(peer_id)
        except TimeoutError:
            raise TimeoutError(f"{peer_id!r} may still be writing after {timeout_s:g} s") from None

    def path_of(self, peer_id: str) -> Path | None:
        """The path in use, None before the first transfer and after a loss."""
        if peer_id == self._channel.node_id:
            return _LOCAL
        traffic = self._traffic.get(peer_id)
        if traffic is None or traffic.path is None:
            return None
        return traffic.path if self._transports[traffic.path.transport].is_open(peer_id) else None

    def snapshot(self) -> list[dict[str, Any]]:
        """One row per peer: peer, transport, reason, refused, bytes_read, bytes_written, seconds, gb_per_s, failures,
        rails. seconds sums over submissions, concurrent ones too."""
        return [self._row(peer_id, traffic) for peer_id, traffic in self._traffic.items()]

    async def close(self) -> None:
        """Stop serving and submitting, in good order. Regions stay with their owners. Call it before the channel's
        close. Idempotent."""
        self._closed = True
        for transport in self._transports.values():
            await transport.close()
        self._copier.close()

    async def _move(self, peer_id: str, op: Op, region: Region, remote: str, moves: Sequence[Span], nbytes: int) -> str:
        path = await self.open(peer_id)
        if not nbytes:
            return path.transport
        if path is _LOCAL:
            other = self._region(remote)
            check([(offset, length) for _, offset, length in moves], remote, other.nbytes)
            await self._copier.copy(Copy(op, region, other, moves), nbytes)
        else:
            await self._transports[path.transport].submit(peer_id, op, region, remote, moves)
        return path.transport

    async def _find(self, peer_id: str) -> Path:
        try:
            answer, _ = await self._channel.call(peer_id, "transfer.open", {}, timeout_s=OPEN_S)
        except RemoteError as error:
            raise TransferError(f"{peer_id!r} does not take part in transfers: {error}") from None
        refused: dict[str, str] = {}
        for name, transport in self._transports.items():
            offer = answer["offers"].get(name)
            if offer is None:
                refused[name] = "the peer does not offer it"
                continue
            try:
                return Path(name, await transport.open(peer_id, offer), refused)
            except Unusable as error:
                refused[name] = str(error)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise TransferError(f"no transport to {peer_id!r}: {reasons}")

    async def _offer(self, peer_id: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        if self._closed:
            raise RemoteError("its transfer engine is closed", "closed")
        return {"offers": {name: transport.offer() for name, transport in self._transports.items()}}

    def _gone(self, peer_id: str) -> None:
        for transport in self._transports.values():
            transport.drop(peer_id)

    def _region(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None or region.closed:
            raise TransferError(f"region {name!r} is not registered here")
        return region

    def _of(self, peer_id: str) -> _Traffic:
        return self._traffic.setdefault(peer_id, _Traffic())

    def _row(self, peer_id: str, traffic: _Traffic) -> dict[str, Any]:
        path = self.path_of(peer_id)
        moved = traffic.bytes_read + traffic.bytes_written
        return {
            "peer": peer_id,
            "transport": path.transport if path else None,
            "reason": path.reason if path else None,
            "refused": path.refused if path else {},
            "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written,
            "seconds": traffic.seconds,
            "gb_per_s": moved / traffic.seconds / 1e9 if traffic.seconds else 0.0,
            "failures": traffic.failures,
            "rails": self._transports[path.transport].rails(peer_id) if path and path is not _LOCAL else [],
        }

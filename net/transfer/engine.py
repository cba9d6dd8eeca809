"""The transfer engine: moves spans of bytes between registered regions of two nodes.

Every pair of nodes uses the first transport of `order` that works between them. `Path` names it, and says why the
better ones do not work. The submitter names both sides. The remote process decides nothing, and over shared memory it
does nothing.

When memory may be reused
-------------------------
When `submit` has returned, or raised any error except PeerLost, no byte moves any more on either side. The memory may
be reused, or returned to its owner, immediately. (A cancelled or timed-out WRITE over TCP waits for the peer to confirm
this, and drops a peer that does not confirm.) A WRITE that did not complete may have landed in part.

When `submit` has raised PeerLost, or the peer was reported lost meanwhile, the local side may be reused immediately.
The remote side may not, because a late byte may still land. The owner of that memory learns of the loss from its own
`on_lost`. It awaits `fence(peer_id)`, and only then reuses slots that the lost peer may have been writing. Until a
WRITE completes or its writer is fenced, the owner keeps its slots held. A deadline alone does not free them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from net.channel.channel import Channel
from net.errors import PeerLost, TransferError
from net.loop.clock import Clock
from net.loop.deadlines import Deadlines
from net.transfer.common.copying import Copier, Copy
from net.transfer.common.holds import Hold
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.path import LOCAL, Completion, Path, Reached
from net.transfer.common.spans import Span, check, merged
from net.transfer.common.traffic import RailLimit
from net.transfer.common.transport import (
    BULK,
    REPAIR,
    URGENT,
    Atomics,
    Carded,
    Mapped,
    Op,
    Pinning,
    Transport,
    Unusable,
)
from net.transfer.path_finder import PathFinder
from net.transfer.rdma import places
from net.transfer.rdma.transport import Rdma
from net.transfer.report import peer_row, rates
from net.transfer.shm.transport import Shm
from net.transfer.tcp.bulk_calls import BulkCalls
from net.transfer.tcp.transport import Tcp

__all__ = [
    "BULK", "REPAIR", "URGENT", "Completion", "LandedSpans", "Op", "Path", "PeerLost", "TransferEngine",
    "TransferError", "transports",
]  # fmt: skip

transports: dict[str, Callable[..., Transport]] = {"shm": Shm, "rdma": Rdma, "tcp": Tcp}
"""The registry of transports, best first."""

ONE_SIDED = frozenset({"shm", "rdma"})
"""The transports that read a peer's memory without its Python."""


class TransferEngine:
    """One per node and channel. Create it before any other listener of `channel.on_lost`: it then cuts off the TCP
    writes of a lost peer before the other listeners learn of the loss."""

    def __init__(
        self,
        channel: Channel,
        order: Sequence[str] = ("shm", "tcp"),
        options: Mapping[str, dict[str, Any]] | None = None,
        rail_limit: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """`order`: the transports to try and to offer to peers, best first. `options`: keyword arguments of their
        constructors, by name. `rail_limit`: maximum bytes per second of all submissions of this node together; 0: no
        limit."""
        if not order or any(name not in transports for name in order):
            raise ValueError(f"transports must be some of {', '.join(transports)}, got {list(order)}")
        self._channel = channel
        self._regions: dict[str, Region] = {}
        given = options or {}
        self._transports = {
            name: transports[name](channel.links, self._regions, **given.get(name, {})) for name in order
        }
        self._peers: dict[str, Reached] = {}
        self._limit = RailLimit(rail_limit) if rail_limit else None
        self._clock = clock or Clock()
        self._copier = Copier()
        self._deadlines = Deadlines()
        self._mapping = {name: one for name, one in self._transports.items() if isinstance(one, Mapped)}
        self._finder = PathFinder(channel, self._transports)
        self.bulk = BulkCalls(self._transports, self.open, self.path_of, self._of, self._limit, self._clock)
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    def refusal(self, transport: str) -> str | None:
        """Why this node cannot use `transport`, one of its order; None if it can. May open devices."""
        refused = self._transports[transport].offer().get("refused")
        return None if refused is None else str(refused)

    def register(self, region: Region) -> None:
        """Let peers read and write the region. Raises ValueError if the name is already registered."""
        if region.name in self._regions:
            raise ValueError(f"region {region.name!r} is already registered: unregister it first")
        self._regions[region.name] = region

    def unregister(self, name: str) -> None:
        """Refuse the region from now on, and stop its running TCP transfers. A peer on this host finishes a running
        copy in the pages that it still has mapped. Raises KeyError."""
        del self._regions[name]
        for transport in self._transports.values():
            transport.withdraw(name)

    async def pin(self, name: str) -> None:
        """Pin a registered region for the cards of this node now, and not at its first transfer. Raises TransferError
        naming the limit."""
        region = self._region(name)
        for transport_name, transport in self._transports.items():
            if isinstance(transport, Pinning) and self.refusal(transport_name) is None:
                try:
                    await transport.pin(region)
                except Unusable as error:
                    raise TransferError(str(error)) from None

    async def open(self, peer_id: str) -> Path:
        """The path to the peer; the first call, and the first call after a loss, finds it. Raises PeerLost,
        PeerRefused, TransferError if no transport works, TimeoutError."""
        if self._finder.closed:
            raise TransferError("the transfer engine is closed")
        if peer_id == self._channel.node_id:
            return LOCAL
        if (path := self.path_of(peer_id)) is not None:
            return path
        peer = self._of(peer_id)
        async with peer.opening:
            if (path := self.path_of(peer_id)) is None:
                peer.path = None  # transfers wait: the transport may seem open before the new epoch is known
                path = peer.path = await self._finder.find(peer_id)
        return path

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: str,
        remote: str,
        spans: Sequence[tuple[int, int, int]],
        timeout_s: float = 30.0,
        priority: int = BULK,
        landed: LandedSpans | None = None,
        epoch: str | None = None,
    ) -> Completion:
        """Move `spans`, each (local offset, remote offset, length), between the region `local` here and `remote`
        there. Spans of one submission should not overlap; they land in any order. A WRITE has landed when this
        returns. `priority` is REPAIR, BULK or URGENT. `landed` records which spans have arrived, also after an error.
        `epoch`, from the peer's `epoch_of`: nothing moves if the peer has lost this node since. Cancel the task to
        cancel the submission. Raises TransferError, PeerLost, PeerRefused, TimeoutError; the module's docstring
        defines when memory may be reused."""
        started = self._clock.now()
        peer = self._of(peer_id)
        deadline = self._deadlines.start(timeout_s)
        path: Path | None = None
        try:
            region = self._region(local)
            moves, nbytes = merged(spans, local, region.nbytes)
            path = peer.path
            if path is None or self._finder.closed or not self._transports[path.transport].is_open(peer_id):
                path = await self.open(peer_id)
            if nbytes and self._limit is not None:
                on_wire = round(nbytes * self._share(peer_id, path))
                await self._clock.until(started + self._limit.hold_s(started, on_wire, priority > BULK))
                if path is not LOCAL and peer.path is not path:  # lost and found again: its memory may be reused
                    raise PeerLost(f"lost {peer_id!r} before a transfer began: {self._channel.links.why_lost(peer_id)}")
            region = self._region(local)  # check again, because this call has waited
            if epoch is not None and peer.path is not None and peer.path.epoch != epoch:
                raise TransferError(f"{peer_id!r} lost this node after it granted access to the memory")
            if nbytes and path is LOCAL:
                await self._copy(op, region, remote, moves, nbytes, priority, landed)
            elif nbytes:
                await self._transports[path.transport].submit(peer_id, op, region, remote, moves, priority, landed)
        except asyncio.CancelledError:
            peer.traffic.failures += 1
            if not deadline.was_hit():
                raise
            if path is not None and path is not LOCAL and (peer.path is not path or self.path_of(peer_id) is None):
                raise PeerLost(f"lost {peer_id!r} during a transfer: {self._channel.links.why_lost(peer_id)}") from None
            raise TimeoutError(
                f"{op.value} of {local!r} with {peer_id!r} did not finish within {timeout_s:g} s"
            ) from None
        except BaseException:
            peer.traffic.failures += 1
            raise
        finally:
            self._deadlines.end(deadline)
        seconds = self._clock.now() - started
        peer.traffic.done(op is Op.READ, nbytes, seconds)
        return Completion(nbytes, seconds, path.transport)

    async def fetch_add(self, peer_id: str, remote: str, offset: int, add: int, timeout_s: float = 10.0) -> int:
        """Add to a 64-bit word of the peer's region `remote` without running its Python; returns the old value. Raises
        Unusable if no path is open or its transport has no atomics, TransferError and TimeoutError (the add may have
        happened), PeerLost."""
        path = self.path_of(peer_id)
        transport = self._transports.get(path.transport) if path is not None else None
        if not isinstance(transport, Atomics):
            raise Unusable(f"no path with atomics to {peer_id!r}")
        async with asyncio.timeout(timeout_s):
            return await transport.fetch_add(peer_id, remote, offset, add)

    async def mapped(self, peer_id: str, remote: str) -> Region | None:
        """The peer's region `remote`, mapped into this process. None if the path is not shared memory, or if
        --rail-limit is set, because reads would bypass it. The owner may change the region at any time, so use only
        content with its own checksum. Raises TransferError, PeerLost, PeerRefused, TimeoutError."""
        if self._limit is not None:
            return None
        path = self.path_of(peer_id) or await self.open(peer_id)
        if path is LOCAL:
            return self._region(remote)
        mapping = self._mapping.get(path.transport)
        return None if mapping is None else await mapping.mapped(peer_id, remote)

    def hold(self, peer_id: str) -> Hold | None:
        """Before a thread writes into a region of the peer that is `mapped`: until its release, the peer's fence waits.
        None if the memory of the peer is not mapped now. Any thread may call."""
        path = self.path_seen(peer_id)
        mapping = None if path is None else self._mapping.get(path.transport)
        return None if mapping is None else mapping.hold(peer_id)

    def epoch_of(self, peer_id: str) -> str:
        """The `epoch` that `peer_id` passes to its WRITEs into memory of this node. A peer that does not know yet that
        this node has lost it then cannot write past the fence."""
        return self._finder.epoch_of(peer_id)

    async def fence(self, peer_id: str, timeout_s: float = 10.0) -> None:
        """The owner of memory calls this after `on_lost` for the peer. Returns when no byte of the peer's earlier
        WRITEs can land here any more. Raises TimeoutError; the slots must then stay held."""
        try:
            async with asyncio.timeout(timeout_s):
                for transport in self._transports.values():
                    await transport.fence(peer_id)
        except TimeoutError:
            raise TimeoutError(f"{peer_id!r} may still be writing after {timeout_s:g} s") from None

    def path_of(self, peer_id: str) -> Path | None:
        """The path in use, None before the first transfer and after a loss."""
        if peer_id == self._channel.node_id:
            return LOCAL
        peer = self._peers.get(peer_id)
        if peer is None or peer.path is None:
            return None
        return peer.path if self._transports[peer.path.transport].is_open(peer_id) else None

    def path_seen(self, peer_id: str) -> Path | None:
        """`path_of` as the event loop last saw it, without a look for notices of the peer. Any thread may ask."""
        peer = self._peers.get(peer_id)
        path = None if peer is None else peer.path
        if path is None:
            return None
        mapping = self._mapping.get(path.transport)
        is_open = self._transports[path.transport].is_open(peer_id) if mapping is None else mapping.maps(peer_id)
        return path if is_open else None

    def regions(self) -> dict[str, dict[str, Any]]:
        """The registered regions by name: nbytes, place ('numa:0', 'cuda:0@PCI address', None: unknown) and nics
        (RDMA devices in use near the region)."""
        carded = [one for one in self._transports.values() if isinstance(one, Carded)]
        return {
            name: {
                "nbytes": one.nbytes,
                "place": places.of(one),
                "nics": [nic for by in carded for nic in by.near(one)],
            }
            for name, one in self._regions.items()
        }

    def is_one_sided(self, peer_id: str) -> bool:
        """Whether a READ over the open path runs without the peer's Python."""
        path = self.path_of(peer_id)
        return path is not None and path.transport in ONE_SIDED

    def may_be_one_sided(self, peer_id: str) -> bool:
        """Whether `open` has not run yet and could find a one-sided path."""
        return self.path_of(peer_id) is None and not ONE_SIDED.isdisjoint(self._transports)

    def bandwidth(self, peer_id: str) -> dict[str, float]:
        """Estimated bytes/s of each rail to the peer that is up and measured (net/transfer/common/rails.py), by rail
        name. A transport without rails has one entry under its own name. TCP reports its urgent or its bulk rails,
        whichever are faster. Empty before the first large transfers, and while no path is open. The sum is the rate of
        a large transfer, with --rail-limit applied."""
        peer, path = self._peers.get(peer_id), self.path_of(peer_id)
        if peer is None:
            return {}
        most = None if self._limit is None else self._limit.bytes_per_s / self._share(peer_id, path)
        return rates(peer, path, self._rails(peer_id, path), most)

    def share(self, peer_id: str) -> float:
        """Bytes on the wire for each byte of the last transfers with the peer; below 1 only with a coder."""
        return self._share(peer_id, self.path_of(peer_id))

    def _share(self, peer_id: str, path: Path | None) -> float:
        """Bytes on the wire for each byte that moves over the path; below 1 only over TCP with a coder."""
        tcp = self._transports.get("tcp")
        return tcp.share(peer_id) if isinstance(tcp, Tcp) and path is not None and path.transport == "tcp" else 1.0

    def coded(self) -> dict[str, dict[str, float]]:
        """What a coder has done for transfers over TCP (net.transfer.tcp.coding.Coding.row); empty without one."""
        tcp = self._transports.get("tcp")
        return tcp.coding.row() if isinstance(tcp, Tcp) and tcp.coding is not None else {}

    def bandwidths(self) -> dict[str, float]:
        """Sum of `bandwidth` over all rails, for every peer with a known bandwidth."""
        return {peer: sum(rails.values()) for peer in self._peers if (rails := self.bandwidth(peer))}

    def snapshot(self) -> list[dict[str, Any]]:
        """One row per peer: peer, transport, reason, refused, why, bytes_read, bytes_written, seconds, gb_per_s,
        failures, retries, latencies, p50_ms, p99_ms, rails. `seconds` is the sum over all submissions, including
        concurrent ones. `latencies` counts per net.transfer.common.traffic.LATENCY_BUCKETS_S; the quantiles are upper
        bounds."""
        ways = [(peer_id, peer, self.path_of(peer_id)) for peer_id, peer in self._peers.items()]
        return [peer_row(peer_id, peer, path, self._rails(peer_id, path)) for peer_id, peer, path in ways]

    async def close(self) -> None:
        """Stop serving and submitting. Owners keep their regions. Call it before closing the channel. Idempotent."""
        self._finder.closed = True
        await self.bulk.close()
        for transport in self._transports.values():
            await transport.close()
        self._copier.close()
        self._deadlines.close()

    async def _copy(
        self,
        op: Op,
        region: Region,
        remote: str,
        moves: Sequence[Span],
        nbytes: int,
        priority: int,
        landed: LandedSpans | None,
    ) -> None:
        """Copy between two regions of this node."""
        other = self._region(remote)
        check([(offset, length) for _, offset, length in moves], remote, other.nbytes)
        await self._copier.copy(Copy(op, region, other, moves, landed), nbytes, priority > BULK)

    def _gone(self, peer_id: str) -> None:
        for transport in self._transports.values():
            transport.drop(peer_id)
        self._finder.lost(peer_id)

    def _region(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None or region.closed:
            raise TransferError(f"region {name!r} is not registered here")
        return region

    def _of(self, peer_id: str) -> Reached:
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = Reached()
        return peer

    def _rails(self, peer_id: str, path: Path | None) -> list[dict[str, Any]]:
        return self._transports[path.transport].rails(peer_id) if path and path is not LOCAL else []

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from net.bulk_calls import BulkCalls
from net.channel import Channel
from net.clock import Clock
from net.copying import Copier, Copy
from net.deadlines import Deadlines
from net.errors import PeerLost, TransferError
from net.landed import Landed
from net.memory import Region
from net.path import LOCAL, Completion, Path, Reached
from net.path_finder import PathFinder
from net.rdma import places
from net.rdma.transport import Rdma
from net.shm import Shm
from net.spans import Span, check, merged
from net.tcp import Tcp
from net.traffic import RailLimit
from net.transfer_report import peer_row, rates
from net.transport import BULK, URGENT, Atomics, Carded, Mapped, Op, Transport, Unusable

__all__ = [
    "BULK", "URGENT", "Completion", "Landed", "Op", "Path", "PeerLost", "TransferEngine", "TransferError", "transports",
]  # fmt: skip

transports: dict[str, Callable[..., Transport]] = {"shm": Shm, "rdma": Rdma, "tcp": Tcp}
"""The registry of transports, best first."""

ONE_SIDED = frozenset({"shm", "rdma"})
"""The transports that read a peer's memory without its Python."""


class TransferEngine:
    """One per node, beside its channel. Make it before whatever else listens to `channel.on_lost`: TCP writes of a
    lost peer are then cut off before the others hear of the loss."""

    def __init__(
        self,
        channel: Channel,
        order: Sequence[str] = ("shm", "tcp"),
        options: Mapping[str, dict[str, Any]] | None = None,
        rail_limit: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """`order`: the transports to try, best first, which are also those offered to peers. `options`: keyword
        arguments of their constructors, by name. `rail_limit`: bytes per second that this node's submissions take
        together at most; 0 = as fast as it goes."""
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
        self._finder = PathFinder(channel, self._transports)
        self.bulk = BulkCalls(self._transports, self.open, self.path_of, self._of, self._limit, self._clock)
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    def refusal(self, transport: str) -> str | None:
        """Why this node cannot use `transport`, one of its order; None when it can. May open devices."""
        refused = self._transports[transport].offer().get("refused")
        return None if refused is None else str(refused)

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
        if self._finder.closed:
            raise TransferError("the transfer engine is closed")
        if peer_id == self._channel.node_id:
            return LOCAL
        if (path := self.path_of(peer_id)) is not None:
            return path
        peer = self._of(peer_id)
        async with peer.opening:
            if (path := self.path_of(peer_id)) is None:
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
        landed: Landed | None = None,
        epoch: str | None = None,
    ) -> Completion:
        """Move `spans`, each (local offset, remote offset, length), between the region `local` here and `remote`
        there. Spans of one submission should not overlap; they land in any order. A WRITE has landed when this
        returns. `priority` is BULK or URGENT. `landed` knows afterwards, also after an error, which spans have
        arrived. `epoch`, of the peer's `epoch_of`: nothing moves if it has lost this node since. Cancel the task to
        cancel the submission. Raises TransferError, PeerLost, PeerRefused, TimeoutError: see the module for what may
        be reused when."""
        started = self._clock.now()
        peer = self._of(peer_id)
        deadline = self._deadlines.start(timeout_s)
        try:
            region = self._region(local)
            moves, nbytes = merged(spans, local, region.nbytes)
            path = peer.path
            if path is None or self._finder.closed or not self._transports[path.transport].is_open(peer_id):
                path = await self.open(peer_id)
            if nbytes and self._limit is not None:
                await self._clock.until(started + self._limit.hold_s(started, nbytes, priority > BULK))
                if path is not LOCAL and peer.path is not path:  # lost and found again: its memory is in other hands
                    raise PeerLost(f"lost {peer_id!r} before a transfer began: {self._channel.links.why_lost(peer_id)}")
            region = self._region(local)  # again, as the rest: this has waited
            if epoch is not None and peer.path is not None and peer.path.epoch != epoch:
                raise TransferError(f"{peer_id!r} has lost this node since it gave the memory")
            if nbytes and path is LOCAL:
                await self._copy(op, region, remote, moves, nbytes, priority, landed)
            elif nbytes:
                await self._transports[path.transport].submit(peer_id, op, region, remote, moves, priority, landed)
        except asyncio.CancelledError:
            peer.traffic.failures += 1
            if not deadline.was_hit():
                raise
            if peer.path is not None and self.path_of(peer_id) is None:
                raise PeerLost(f"lost {peer_id!r} during a transfer: {self._channel.links.why_lost(peer_id)}") from None
            raise TimeoutError(f"{op.value} of {local!r} with {peer_id!r} not done within {timeout_s:g} s") from None
        except BaseException:
            peer.traffic.failures += 1
            raise
        finally:
            self._deadlines.end(deadline)
        seconds = self._clock.now() - started
        peer.traffic.done(op is Op.READ, nbytes, seconds)
        return Completion(nbytes, seconds, path.transport)

    async def fetch_add(self, peer_id: str, remote: str, offset: int, add: int, timeout_s: float = 10.0) -> int:
        """Add to a 64-bit word of the peer's region `remote` without its Python; returns what it was. Raises Unusable
        when no path is open or the path's transport cannot, TransferError and TimeoutError (it may have happened),
        PeerLost."""
        path = self.path_of(peer_id)
        transport = self._transports.get(path.transport) if path is not None else None
        if not isinstance(transport, Atomics):
            raise Unusable(f"no path with atomics to {peer_id!r}")
        async with asyncio.timeout(timeout_s):
            return await transport.fetch_add(peer_id, remote, offset, add)

    async def mapped(self, peer_id: str, remote: str) -> Region | None:
        """The peer's region `remote` in this process's memory; None when the path to it is not shared memory, or when
        there is a limit that reading it would pass by. Its owner changes it at any time, so only content that proves
        itself can be used. Raises TransferError, PeerLost, PeerRefused, TimeoutError."""
        if self._limit is not None:
            return None
        path = self.path_of(peer_id) or await self.open(peer_id)
        if path is LOCAL:
            return self._region(remote)
        transport = self._transports[path.transport]
        return await transport.mapped(peer_id, remote) if isinstance(transport, Mapped) else None

    def epoch_of(self, peer_id: str) -> str:
        """For the owner of memory that `peer_id` may write to from now on: the `epoch` of those submissions. A peer
        that this node loses, and that does not know it yet, can then not write there behind the fence."""
        return self._finder.epoch_of(peer_id)

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
            return LOCAL
        peer = self._peers.get(peer_id)
        if peer is None or peer.path is None:
            return None
        return peer.path if self._transports[peer.path.transport].is_open(peer_id) else None

    def regions(self) -> dict[str, dict[str, Any]]:
        """nbytes, place ('numa:0', 'cuda:0@PCI address', None = not known) and nics (RDMA devices in use near it) of
        what is registered here, by name."""
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
        """Whether a READ from this peer goes without its Python, by the path that is open now."""
        path = self.path_of(peer_id)
        return path is not None and path.transport in ONE_SIDED

    def may_be_one_sided(self, peer_id: str) -> bool:
        """Whether `open` could make it so: it has not been tried."""
        return self.path_of(peer_id) is None and not ONE_SIDED.isdisjoint(self._transports)

    def bandwidth(self, peer_id: str) -> dict[str, float]:
        """Estimated bytes/s of each rail to the peer that is up and has been measured (net/rails.py), by rail name; for
        a transport with one way its name; over TCP the rails of what is urgent or of what is not, whichever are faster.
        Empty before the first large transfers, and while no path is open. Their sum is what a large transfer gets,
        --rail-limit included."""
        peer, path = self._peers.get(peer_id), self.path_of(peer_id)
        if peer is None:
            return {}
        most = None if self._limit is None else self._limit.bytes_per_s
        return rates(peer, path, self._rails(peer_id, path), most)

    def bandwidths(self) -> dict[str, float]:
        """`bandwidth` of every peer it is known of, all rails together."""
        return {peer: sum(rails.values()) for peer in self._peers if (rails := self.bandwidth(peer))}

    def snapshot(self) -> list[dict[str, Any]]:
        """One row per peer: peer, transport, reason, refused, why, bytes_read, bytes_written, seconds, gb_per_s,
        failures, retries, latencies, p50_ms, p99_ms, rails. seconds sums over submissions, concurrent ones too;
        latencies are counts per net.traffic.LATENCY_BUCKETS_S, of which the quantiles are upper bounds."""
        ways = [(peer_id, peer, self.path_of(peer_id)) for peer_id, peer in self._peers.items()]
        return [peer_row(peer_id, peer, path, self._rails(peer_id, path)) for peer_id, peer, path in ways]

    async def close(self) -> None:
        """Stop serving and submitting, in good order. Regions stay with their owners. Call it before the channel's
        close. Idempotent."""
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
        landed: Landed | None,
    ) -> None:
        """Both sides are here."""
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

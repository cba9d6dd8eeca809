"""Leases: which slots of this node's share each peer may read or write now, and when the slots are released.

Every lease ends: when its owner ends it, when its owner leaves or is lost, or at its deadline. Pinned slots may then
change; a peer that still reads them detects that by the checksum. Reserved slots may not, because a late byte would
damage another block. They are reused only after the transfer engine's fence, and a peer that holds a reservation past
its deadline is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.messages import NO_PLACE, Place
from cache.offer import PLAIN_OFFER, Offer
from cache.protocol import Deadlines
from cache.tiers.local_store import LocalStore
from net.channel.channel import Channel
from net.errors import RemoteError
from net.loop.tasks import spawn
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """Slots that a peer may access until the timer fires; none before the grant."""

    writes: bool
    timer: asyncio.TimerHandle
    slots: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    offer: Offer = PLAIN_OFFER  # the writer's facts about its blocks


class Leases:
    """Leases on slots of `local`, by peer and by the number that the peer chose."""

    def __init__(
        self, node_id: str, channel: Channel, transfer: TransferEngine, local: LocalStore, deadlines: Deadlines
    ) -> None:
        self._node_id = node_id
        self._channel = channel
        self._transfer = transfer
        self._local = local
        self._deadlines = deadlines
        self._leases: dict[tuple[str, int], Lease] = {}
        self._fenced: dict[asyncio.Task[None], Lease] = {}  # ended, but their slots are not safe to reuse yet
        self.expired = 0  # leases that ended by their deadline
        channel.on_lost(self.gone)
        channel.on_closed(self.gone)

    def __len__(self) -> int:
        return len(self._leases) + len(self._fenced)

    def open(self, peer: str, number: int, *, writes: bool, offer: Offer = PLAIN_OFFER) -> None:
        """Open a lease before its grant, so that the peer can end it while it waits."""
        if (peer, number) in self._leases:
            raise RemoteError(f"lease {number} is in use", "bad_request")
        timer = asyncio.get_running_loop().call_later(self._deadlines.lease_s, self._expire, peer, number)
        self._leases[peer, number] = Lease(writes, timer, offer=offer)

    def grant(self, peer: str, number: int, slots: list[int], keys: list[BlockKey], *, writes: bool) -> Place:
        """Put the slots under the lease; returns how the peer reaches them. Without slots the lease is over."""
        lease = self._leases.get((peer, number))
        if lease is None:
            self.give_back(slots, writes=writes)
            raise RemoteError("the lease has ended before its grant", "expired")
        lease.slots, lease.keys = slots, keys
        arena = self._local.arena
        if not slots or arena is None:
            self.take(peer, number)
            return NO_PLACE
        return Place(arena.name, arena.slot_bytes, self._transfer.epoch_of(peer) if writes else "")

    def take(self, peer: str, number: int) -> Lease | None:
        """End the lease and return it; the caller settles its slots. None if the peer has no lease with that number."""
        lease = self._leases.pop((peer, number), None)
        if lease is not None:
            lease.timer.cancel()
        return lease

    def give_back(self, slots: list[int], *, writes: bool) -> None:
        give: Callable[[list[int]], None] = self._abandon if writes else self._local.pinning.unpin
        give(slots)

    def _abandon(self, slots: list[int]) -> None:
        for slot in slots:
            self._local.reservations.abandon(slot)

    def _expire(self, peer: str, number: int) -> None:
        lease = self.take(peer, number)
        if lease is None:
            return
        if lease.writes and lease.slots and peer != self._node_id:
            self._channel.drop(peer, f"it sat on reserved slots for {self._deadlines.lease_s:g} s")
        self._settle(peer, lease)

    def gone(self, peer: str) -> None:
        for owner, number in [name for name in self._leases if name[0] == peer]:
            if (lease := self.take(owner, number)) is not None:
                self._settle(peer, lease)

    def _settle(self, peer: str, lease: Lease) -> None:
        """Release the leased slots as soon as the peer can no longer write to them."""
        self.expired += 1
        if not lease.writes or not lease.slots or peer == self._node_id:
            self.give_back(lease.slots, writes=lease.writes)
            return
        task = spawn(self._behind_fence(peer, lease), "fencing reserved slots")
        self._fenced[task] = lease
        task.add_done_callback(lambda done: self._fenced.pop(done, None))

    async def _behind_fence(self, peer: str, lease: Lease) -> None:
        while True:
            try:
                await self._transfer.fence(peer)
                break
            except TimeoutError as error:
                log.warning("%d reserved slots are still held: %s", len(lease.slots), error)
        self.give_back(lease.slots, writes=True)

    async def close(self) -> None:
        """Release everything. Close the channel and the transfer engine first, so that no peer writes here."""
        fenced = list(self._fenced.items())
        for task, _ in fenced:
            task.cancel()
        if self._fenced:
            await asyncio.wait(list(self._fenced))
        rest = [lease for task, lease in fenced if task.cancelled()] + list(self._leases.values())
        self._leases.clear()
        for lease in rest:
            lease.timer.cancel()
            self.give_back(lease.slots, writes=lease.writes)

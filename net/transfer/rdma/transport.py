"""RDMA as a transport of the transfer engine: devices, reachable peers, links to peers and targets for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from net.channel.connection import Connection, Receiver
from net.channel.links import Links
from net.errors import PeerLost
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span
from net.transfer.common.topology import NEAR, Overrides, Topology
from net.transfer.common.transport import BULK, Op, Unusable
from net.transfer.rdma.device import Device, registered
from net.transfer.rdma.link import Link
from net.transfer.rdma.places import far_rails, nics
from net.transfer.rdma.target import Target
from net.transfer.rdma.verbs import chosen_devices

PLAINTEXT = "it would move bytes unencrypted, and there is a cluster key: see --rdma-plaintext"


class Rdma:
    """Works between nodes whose devices reach each other; a rail joins devices with the same rail number
    (net/transfer/common/topology.py)."""

    name = "rdma"

    def __init__(
        self,
        links: Links,
        regions: Mapping[str, Region],
        devices: Sequence[str] = (),
        gid_index: int | None = None,
        overrides: Overrides | None = None,
        sealed_only: bool = False,
    ) -> None:
        """`devices`: names of the devices to use; empty: all, sorted by name. The index in this list is the rail number
        unless `overrides` contains another. `sealed_only`: this node sends bytes only encrypted, so it neither offers
        nor uses RDMA. Devices are opened when the first peer asks."""
        self._links = links
        self._regions = regions
        self._wanted = list(devices)
        self._gid_index = gid_index
        self._overrides = overrides or Overrides()
        self._devices: list[Device] = []
        self._topology = Topology(())
        self._peers: dict[str, Link] = {}
        self._targets: set[Target] = set()
        self._opening: dict[str, asyncio.Lock] = {}
        self._sealed_only = sealed_only
        if not sealed_only:
            links.accept("rdma", self._accept)

    def devices(self) -> Sequence[Device]:
        """Opens the devices on the first call. Raises Unusable with the reason if this node cannot use any."""
        if self._sealed_only:
            raise Unusable(PLAINTEXT)
        if not self._devices:
            opened: list[Device] = []
            try:
                for name in chosen_devices(self._wanted):
                    opened.append(Device(name, self._gid_index))
            except Unusable:
                for device in opened:
                    device.close()
                raise
            self._devices = opened
            self._topology = Topology(nics([device.name for device in opened]), self._overrides)
        return self._devices

    def _accept(self, connection: Connection) -> Receiver:
        if connection.dialed:
            link = Link(connection, self.devices(), self._topology, self._regions)
            self._peers[connection.peer_id] = link
            return link
        devices = self.devices()
        return Target(connection, devices, self._regions, self._targets, self._topology)

    def link(self, peer_id: str) -> Link:
        """The link to a peer that `open` has reached. Raises PeerLost."""
        link = self._peers.get(peer_id)
        if link is None or link.ended:
            raise PeerLost(f"the RDMA connection to {peer_id!r} is closed")
        return link

    def near(self, region: Region) -> list[str]:
        """See net.transfer.common.transport.Carded."""
        names = [device.name for device in self._devices]
        distances = far_rails(self._topology, region, names)
        return [name for name, distance in zip(names, distances, strict=True) if distance == NEAR]

    async def pin(self, region: Region) -> None:
        """See net.transfer.common.transport.Pinning."""
        await registered(self.devices(), region)

    # --- net.transfer.common.transport.Transport

    def offer(self) -> dict[str, Any]:
        try:
            gids = {device.name: device.gid.hex() for device in self.devices()}
            return {"rails": self._topology.rail_numbers, "gids": gids}
        except Unusable as error:
            return {"refused": str(error)}

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        self.devices()
        if "refused" in offer:
            raise Unusable(f"the peer: {offer['refused']}")
        async with self._opening.setdefault(peer_id, asyncio.Lock()):
            if not self.is_open(peer_id):
                await self._links.dial(peer_id, "rdma")  # `_accept` makes the link
                link = self.link(peer_id)
                try:
                    return await link.open(offer["rails"])
                except (Unusable, TimeoutError) as error:
                    self._peers.pop(peer_id, None)
                    link.end("no rail could be opened")
                    link.connection.close()
                    raise Unusable(str(error) or "the peer does not answer about RDMA") from None
        return "RDMA over " + ", ".join(rail.name for rail in self._peers[peer_id].rails if rail.up)

    def is_open(self, peer_id: str) -> bool:
        link = self._peers.get(peer_id)
        return link is not None and not link.ended

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> None:
        await self.link(peer_id).submit(op, local, remote, spans, priority, landed)

    async def fetch_add(self, peer_id: str, remote: str, offset: int, add: int) -> int:
        """See net.transfer.common.transport.Atomics."""
        return await self.link(peer_id).fetch_add(remote, offset, add)

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        link = self._peers.get(peer_id)
        return [rail.row() for rail in link.rails] if link is not None else []

    def withdraw(self, name: str) -> None:
        for device in self._devices:
            device.deregister(name)
        for target in self._targets:
            with suppress(PeerLost):
                target.withdraw(name)

    def drop(self, peer_id: str) -> None:
        if (link := self._peers.pop(peer_id, None)) is not None:
            link.end(self._links.why_lost(peer_id))
            link.connection.abort()
        for target in [one for one in self._targets if one.connection.peer_id == peer_id]:
            target.end()
            target.connection.abort()

    async def fence(self, peer_id: str) -> None:
        """Nothing to do: `drop` has destroyed the queue pairs, which is the fence."""

    async def close(self) -> None:
        for link in list(self._peers.values()):
            link.end("this node is closing")
            link.connection.close()
        for target in list(self._targets):
            target.end()
            target.connection.close()
        self._peers.clear()
        devices, self._devices = self._devices, []
        for device in devices:
            await device.settled()
            device.close()

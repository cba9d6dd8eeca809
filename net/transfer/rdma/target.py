"""The passive end of RDMA: queue pairs through which one peer reads and writes this node's regions.

The card does the work; this side only creates queue pairs, sends keys, and withdraws both. `end` is the fence: after
it, no byte of the peer can land here any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from net.channel.connection import Connection
from net.channel.wire import Frame, Header, nowhere
from net.errors import PeerLost
from net.loop.tasks import spawn
from net.transfer.common.memory import Region
from net.transfer.common.topology import Topology
from net.transfer.common.transport import Unusable
from net.transfer.rdma.device import Device, registered
from net.transfer.rdma.endpoint import Endpoint
from net.transfer.rdma.places import far_rails
from net.transfer.rdma.queue_pair import QueuePair, VerbsError


def _nothing(*arguments: Any) -> None:
    """This side posts no requests, so none completes."""


class Target:
    """The queue pairs and regions here that one peer uses."""

    def __init__(
        self,
        connection: Connection,
        devices: Sequence[Device],
        regions: Mapping[str, Region],
        everyone: set[Target],
        topology: Topology,
    ) -> None:
        self.connection = connection
        self._all_devices = {device.name: device for device in devices}
        self._devices: list[Device] = []  # of the rails, as the peer chose them
        self._topology = topology
        self._regions = regions
        self._everyone = everyone
        self._pairs: list[QueuePair | None] = []
        self._telling: set[asyncio.Task[None]] = set()
        everyone.add(self)

    def _connect(self, names: Sequence[str], rails: Sequence[Any]) -> list[Any]:
        """For every rail, our endpoint or the reason why the rail cannot be used."""
        if unknown := [name for name in names if name not in self._all_devices]:
            return [f"the peer has no RDMA device {unknown[0]!r}"] * len(rails)
        self._devices = [self._all_devices[name] for name in names]
        self._pairs = [None] * len(names)
        return [self._open(index, theirs) for index, theirs in enumerate(rails)]

    def _open(self, index: int, theirs: Any) -> Any:
        """Open a new generation of the rail. Returns our endpoint, or the reason for a failure."""
        try:
            pair = self._pairs[index]
            if pair is None:
                pair = self._pairs[index] = QueuePair(self._devices[index], _nothing, _nothing, sends=1)
            else:
                pair.reset()
            pair.connect(Endpoint.from_json(theirs))
            return pair.endpoint().to_json()
        except (VerbsError, ValueError) as error:
            return str(error)

    def _tell(self, name: str) -> None:
        """Send address and keys of a region when its memory is pinned."""
        task = spawn(self._send_keys(name), "sending the keys of a region")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _send_keys(self, name: str) -> None:
        answer = await self._keys(name)
        with suppress(PeerLost):
            self.connection.send({"op": "region", "name": name, **answer})

    async def _keys(self, name: str) -> Header:
        region = self._regions.get(name)
        if region is None or region.closed:
            return {"reason": f"region {name!r} is not registered there"}
        try:
            keys = [one.rkey for one in await registered(self._devices, region)]
        except Unusable as error:
            return {"reason": str(error)}
        distances = far_rails(self._topology, region, [device.name for device in self._devices])
        return {"address": region.address, "nbytes": region.nbytes, "keys": keys, "distances": distances}

    def withdraw(self, name: str) -> None:
        self.connection.send({"op": "gone", "region": name})

    def end(self) -> None:
        """When this returns, no byte of the peer lands here any more. Idempotent."""
        self._everyone.discard(self)
        for task in self._telling:
            task.cancel()
        for pair in self._pairs:
            if pair is not None:
                pair.close()
        self._pairs = []

    # --- net.channel.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return nowhere(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        if "rail" in header and header["rail"] not in range(len(self._pairs)):
            return  # this rail was never connected
        match header["op"]:
            case "connect" if not self._pairs:
                connection.send({"op": "connected", "rails": self._connect(header["devices"], header["rails"])})
            case "region":
                self._tell(header["name"])
            case "stop":
                if (pair := self._pairs[header["rail"]]) is not None:
                    pair.break_off("the peer stopped it")
                connection.send({"op": "stopped", "rail": header["rail"]})
            case "start":
                answer = self._open(header["rail"], header["endpoint"])
                key = "reason" if isinstance(answer, str) else "endpoint"
                connection.send(
                    {"op": "started", "rail": header["rail"], "generation": header["generation"], key: answer}
                )

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end()

"""The submitting end of RDMA to one peer: stripes slices over queue pairs on every rail, resends them on failure.

On a TCP connection in addition to the rails, the two sides exchange queue pairs and regions:

    connect{rails: [endpoint ...], devices: [name ...]} ──>   <── connected{rails: [endpoint | reason ...]}
    region{name} ──>             <── region{name, address, nbytes, keys: [rkey ...], distances}  or  {name, reason}
                                 <── gone{region}             unregistered there

A rail joins one of our devices to one of the peer's; both are chosen when the link is opened. net/transfer/rdma/pump.py
sends slices, net/transfer/rdma/revival.py restores broken rails.

When a rail breaks, its slices are sent again on the others. Their first copies may still be in flight and must not land
in memory that has been reused since. Therefore a WRITE that was sent again is complete only after the peer has
confirmed with `stopped` that the broken queue pair receives nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from net.channel.connection import Connection
from net.channel.wire import Frame, Header, nowhere
from net.errors import PeerLost, TransferError
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.rails import Rail
from net.transfer.common.spans import Span, check
from net.transfer.common.topology import Topology, pairs
from net.transfer.common.transport import BULK, Op, Unusable
from net.transfer.rdma.device import Device, registered
from net.transfer.rdma.endpoint import Endpoint
from net.transfer.rdma.job import RemoteRegion, Slice, Submission
from net.transfer.rdma.places import far_rails
from net.transfer.rdma.pump import Pump
from net.transfer.rdma.questions import REGION_S, Questions
from net.transfer.rdma.queue_pair import QueuePair, VerbsError, WorkRequest
from net.transfer.rdma.revival import Revival
from net.transfer.rdma.verbs import verbs

WORD_BYTES = 8  # size of the word of an atomic


class Link:
    """A peer that this node reads from and writes to."""

    def __init__(
        self, connection: Connection, devices: Sequence[Device], topology: Topology, here: Mapping[str, Region]
    ) -> None:
        """devices: of this node; topology: of these devices; here: regions that are registered on this node."""
        self.connection = connection
        self.rails: list[Rail] = []
        self.ended = False
        self._all_devices = {device.name: device for device in devices}
        self._topology = topology
        self._here = here
        self._devices: list[Device] = []  # of the rails
        self._regions: dict[str, RemoteRegion] = {}
        self._questions = Questions(connection)
        self._pump = Pump(self.rails, self._broken)
        self._revival: Revival | None = None
        self._scratch = Region.private(f"scratch of the link to {connection.peer_id}", WORD_BYTES)
        self._word_free = asyncio.Lock()  # guards `_scratch`, which receives the result of an atomic

    # --- opening

    async def open(self, theirs: Mapping[str, int]) -> str:
        """Connect every rail that both sides have; returns one line that describes the result. theirs: rail numbers of
        the peer's devices. Raises Unusable, PeerLost."""
        joined = pairs(self._topology.rail_numbers, theirs)
        if not joined:
            ours = ", ".join(f"{name} = {number}" for name, number in self._topology.rail_numbers.items())
            raise Unusable(f"the two nodes share no rail number ({ours}): see --rdma-devices and --topology-file")
        self._devices[:] = [self._all_devices[here] for here, _ in joined]
        self.rails[:] = [Rail(here) for here, _ in joined]
        try:
            for index, device in enumerate(self._devices):
                self._pump.pairs.append(QueuePair(device, self._pump.done_on(index), self._pump.error_on(index)))
        except VerbsError as error:
            raise Unusable(str(error)) from None
        self._revival = Revival(self._devices, self._pump, self._questions, self._join, self._give_up)
        endpoints = [pair.endpoint().to_json() for pair in self._pump.pairs]
        question = {"op": "connect", "rails": endpoints, "devices": [there for _, there in joined]}
        answer = await self._questions.ask("connected", question)
        self._check()
        reasons = []
        for index, endpoint in enumerate(answer["rails"]):
            try:
                self._join(index, endpoint)
            except (VerbsError, ValueError) as error:
                reasons.append(f"{self.rails[index].name}: {error}")
        if not any(rail.up for rail in self.rails):
            raise Unusable("; ".join(reasons))
        return "RDMA over " + ", ".join(rail.name for rail in self.rails if rail.up)

    def _join(self, index: int, theirs: Any) -> None:
        if isinstance(theirs, str):
            raise ValueError(theirs)
        self._pump.pairs[index].connect(Endpoint.from_json(theirs))
        self.rails[index].opened()

    def _broken(self, index: int) -> None:
        if self._revival is not None:
            self._revival.revive(index)

    def _give_up(self, reason: str) -> None:
        self.connection.abort()
        self.end(reason)

    # --- submitting

    async def submit(
        self,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> None:
        """See net.transfer.common.transport.Transport."""
        region = await self._region(remote)
        check([(offset, length) for _, offset, length in spans], remote, region.nbytes)
        opcode = verbs().lib.IBV_WR_RDMA_READ if op is Op.READ else verbs().lib.IBV_WR_RDMA_WRITE

        self._check_here(local)
        try:
            ours = await registered(self._devices, local)
        except Unusable as error:
            raise TransferError(str(error)) from None
        self._check_here(local)

        def make(index: int, piece: Slice) -> WorkRequest:
            here, there, key = ours[index], region.address + piece.remote, region.keys[index]
            return WorkRequest(opcode, here.address + piece.local, here.lkey, there, key, piece.length, piece)

        job = Submission(op, priority=priority, distances=self._distances(local, region), landed=landed)
        job.add(spans, make)
        try:
            await self._pump.run(job)
        except TransferError:
            if self._regions.get(remote) is region:
                del self._regions[remote]  # the peer may have refused its key: the next submission asks again
            raise

    def _check_here(self, local: Region) -> None:
        """Called after a wait, in which the owner may have closed the region. Raises TransferError."""
        if self._here.get(local.name) is not local or local.closed:
            raise TransferError(f"region {local.name!r} is not registered here")

    def _distances(self, local: Region, remote: RemoteRegion) -> list[int]:
        """The distance of each rail: the sum of its distances from both memories."""
        ours = far_rails(self._topology, local, [device.name for device in self._devices])
        return [here + there for here, there in zip(ours, remote.distances, strict=True)]

    async def fetch_add(self, remote: str, offset: int, add: int) -> int:
        """Add to the 64-bit word at `offset` of the peer's region; returns the old value. Atomic among network cards,
        but the peer's CPU must not write the word. Raises TransferError; the add may have happened."""
        region = await self._region(remote)
        check([(offset, WORD_BYTES)], remote, region.nbytes)
        opcode = verbs().lib.IBV_WR_ATOMIC_FETCH_AND_ADD

        def make(index: int, piece: Slice) -> WorkRequest:
            here = self._devices[index].register(self._scratch)
            there, key = region.address + offset, region.keys[index]
            return WorkRequest(opcode, here.address, here.lkey, there, key, WORD_BYTES, piece, add=add % 2**64)

        async with self._word_free:
            job = Submission(Op.READ, once=True)
            job.waiting.append(Slice(job, make))
            await self._pump.run(job)
            self._check()
            return int.from_bytes(self._scratch.memory[:WORD_BYTES], "little")

    # --- the TCP connection

    async def _region(self, name: str) -> RemoteRegion:
        if name not in self._regions:
            answer = await self._questions.ask("region", {"op": "region", "name": name}, REGION_S)
            if "reason" in answer:
                raise TransferError(str(answer["reason"]))
            if name not in self._regions:
                raise TransferError(f"region {name!r} is not registered there any more")
        return self._regions[name]

    def _check(self) -> None:
        """Called after a wait. Raises PeerLost if the link has ended."""
        if self.ended:
            raise PeerLost(f"lost {self.connection.peer_id!r}: the RDMA link has ended")

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return nowhere(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        if header["op"] == "gone":
            self._regions.pop(header["region"], None)
            return
        if header["op"] == "region" and "reason" not in header:
            # Stored here and not in `_region`: "gone" may be the next frame, before the waiting tasks have run.
            self._regions[header["name"]] = RemoteRegion(
                int(header["address"]), int(header["nbytes"]), list(header["keys"]), header["distances"]
            )
        self._questions.answered(header)

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end(reason or "it has closed")

    def end(self, reason: str) -> None:
        """Release the memory on this side and fail the running jobs with PeerLost. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if self._revival is not None:
            self._revival.end()
        for pair in self._pump.pairs:
            pair.close()
        for device in self._devices:
            device.deregister(self._scratch.name)
        self._scratch.close()
        lost = PeerLost(f"lost {self.connection.peer_id!r} during a transfer: {reason}")
        self._pump.end(lost)
        self._questions.end(lost)

"""The submitting end of RDMA to one peer: queue pairs on every rail, slices striped over them, sent again on failure.

Beside the rails runs a TCP connection, on which the two sides agree about queue pairs and regions:

    connect{rails: [endpoint ...]} ──>  <── connected{rails: [endpoint | reason ...]}
    region{name} ──>                    <── region{name, address, nbytes, keys: [rkey ...]}  or  {name, reason}
    stop{rail} ──>                      <── stopped{rail}            its old queue pair takes nothing any more
    start{rail, endpoint} ──>           <── started{rail, endpoint}  or  {rail, reason}
                                        <── gone{region}             unregistered there

When a rail breaks, its slices go again on the others. The first try may still be on its way, and must not land in
memory that has been reused since: a WRITE that had to be sent again is complete only after the peer has confirmed
with `stopped` that the broken queue pair takes nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from net import rails
from net.connection import Connection
from net.errors import PeerLost, TransferError
from net.memory import Region
from net.rails import Rail
from net.rdma.device import Device
from net.rdma.queue_pair import Endpoint, QueuePair, Request, VerbsError
from net.rdma.verbs import verbs
from net.spans import Span, check
from net.transport import Op, Unusable
from net.wire import Frame, Header, nowhere

SLICE = 1 << 20
"""Bytes of one request: long enough for line rate, short enough to stripe, and not above what Soft-RoCE can READ."""

ATTEMPTS = 9  # of one slice
ANSWER_S = 10.0
CANCEL_S = 5.0  # for what a cancelled transfer has in the queues


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A region of the peer: where it starts and its key on each rail."""

    address: int
    nbytes: int
    keys: Sequence[int]


@dataclass(slots=True, eq=False)
class Slice:
    job: Job
    local: int  # offsets, bytes
    remote: int
    length: int
    attempts: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One submission."""

    op: Op
    local: Region
    remote: RemoteRegion
    done: asyncio.Future[None]
    waiting: deque[Slice] = field(default_factory=deque)
    under_way: int = 0  # slices in queues
    unsettled: set[int] = field(default_factory=set)  # rails a WRITE broke on whose old queue pair may still take it

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.under_way and not self.unsettled


class Link:
    """A peer that this node reads from and writes to."""

    def __init__(self, connection: Connection, devices: Sequence[Device]) -> None:
        self.connection = connection
        self.rails = [Rail(device.name) for device in devices]
        self._devices = devices
        self._pairs: list[QueuePair] = []
        self._jobs: dict[Job, None] = {}  # oldest first
        self._regions: dict[str, RemoteRegion] = {}
        self._asked: dict[tuple[str, Any], asyncio.Future[Header]] = {}
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self.closed_for_good = False
        for index, device in enumerate(devices):
            device.on_port.append(self._port_listener(index))

    # --- opening

    async def open(self) -> str:
        """Connect every rail that both sides have; one line on the result. Raises Unusable, PeerLost."""
        try:
            self._pairs = [
                QueuePair(device, self._done_on(i), self._error_on(i)) for i, device in enumerate(self._devices)
            ]
        except VerbsError as error:
            raise Unusable(str(error)) from None
        ours = [pair.endpoint().to_json() for pair in self._pairs]
        answer = await self._ask("connected", None, {"op": "connect", "rails": ours})
        reasons = []
        for index, theirs in enumerate(answer["rails"]):
            try:
                self._join(index, theirs)
            except (VerbsError, ValueError) as error:
                reasons.append(f"{self.rails[index].name}: {error}")
        if not any(rail.up for rail in self.rails):
            raise Unusable("; ".join(reasons) or "the peer has no rail for it")
        return "RDMA over " + ", ".join(rail.name for rail in self.rails if rail.up)

    def _join(self, index: int, theirs: Any) -> None:
        if isinstance(theirs, str):
            raise ValueError(theirs)
        self._pairs[index].connect(Endpoint.from_json(theirs))
        self.rails[index].opened()

    # --- submitting

    async def submit(self, op: Op, local: Region, remote: str, spans: Sequence[Span]) -> None:
        """See net.transport.Transport."""
        region = await self._region(remote)
        check([(offset, length) for _, offset, length in spans], remote, region.nbytes)
        for device in self._devices:
            device.register(local)
        job = Job(op, local, region, asyncio.get_running_loop().create_future())
        for here, there, length in spans:
            for offset, size in rails.cut(here, length, SLICE):
                job.waiting.append(Slice(job, offset, there + offset - here, size))
        self._jobs[job] = None
        try:
            self._pump()
            await job.done
        except asyncio.CancelledError:
            await self._settle(job)
            raise
        finally:
            self._jobs.pop(job, None)

    async def _settle(self, job: Job) -> None:
        """A job was given up: return when nothing of it moves any more."""
        job.waiting.clear()
        if job.idle or self.closed_for_good:
            return
        job.done = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CANCEL_S):
                await job.done
        except TransferError:
            pass  # refused, which is an end too
        except TimeoutError:
            for index in range(len(self._pairs)):
                self._pairs[index].break_off("a cancelled transfer did not end")

    def _pump(self) -> None:
        """Post waiting slices, oldest job first, as the rails have room."""
        room = [pair.room for pair in self._pairs]
        batches: list[list[Slice]] = [[] for _ in self._pairs]
        now = time.monotonic()
        for job in self._jobs:
            while job.waiting:
                index = rails.choose(self.rails, job.waiting[0].length, room)
                if index is None:
                    break
                piece = job.waiting.popleft()
                job.under_way += 1
                room[index] -= 1
                self.rails[index].sent(now, piece.length)
                batches[index].append(piece)
        for index, batch in enumerate(batches):
            if batch and self._pairs[index].ready:
                self._pairs[index].post([self._request(index, piece) for piece in batch])
            elif batch:  # the rail broke while another batch was posted
                self._again(index, batch)

    def _request(self, index: int, piece: Slice) -> Request:
        lib, job = verbs().lib, piece.job
        local = self._devices[index].register(job.local)
        return Request(
            opcode=lib.IBV_WR_RDMA_READ if job.op is Op.READ else lib.IBV_WR_RDMA_WRITE,
            local=local.address + piece.local,
            lkey=local.lkey,
            remote=job.remote.address + piece.remote,
            rkey=job.remote.keys[index],
            length=piece.length,
            item=piece,
        )

    # --- what the queue pairs say

    def _done_on(self, index: int) -> Any:
        def done(pieces: list[Slice]) -> None:
            now = time.monotonic()
            for piece in pieces:
                self.rails[index].arrived(now, piece.length)
                piece.job.under_way -= 1
                self._finish_if_idle(piece.job)
            self._pump()

        return done

    def _error_on(self, index: int) -> Any:
        def error(pieces: list[Slice], why: str, refused: bool) -> None:
            self.rails[index].failed(time.monotonic())
            if refused and pieces:
                # Its memory is not there any more: the fault of the transfer, so the rail comes back at once.
                self.rails[index].retry_at = 0.0
                self._fail(pieces[0].job, TransferError(f"the memory of a transfer was refused: {why}"))
            self._again(index, pieces)
            self._revive(index)
            self._pump()

        return error

    def _again(self, index: int, pieces: Sequence[Slice]) -> None:
        """These slices did not arrive by rail `index`, or may have."""
        for piece in reversed(pieces):
            job = piece.job
            job.under_way -= 1
            piece.attempts += 1
            self.rails[index].resent += 1
            if job.op is Op.WRITE:
                job.unsettled.add(index)
            if piece.attempts >= ATTEMPTS:
                self._fail(job, TransferError(f"a slice failed {ATTEMPTS} times, last on {self.rails[index].name}"))
            if job in self._jobs and not job.done.done():
                job.waiting.appendleft(piece)
        for job in {piece.job for piece in pieces}:
            self._finish_if_idle(job)

    def _fail(self, job: Job, error: Exception) -> None:
        job.waiting.clear()
        if not job.done.done():
            job.done.set_exception(error)
            job.done.exception()  # the one who waited may have been cancelled

    def _finish_if_idle(self, job: Job) -> None:
        if job.idle and not job.done.done():
            job.done.set_result(None)

    # --- broken rails

    def _port_listener(self, index: int) -> Any:
        def changed(active: bool) -> None:
            if self.closed_for_good or not self._pairs:
                return
            if active:
                self.rails[index].retry_at = 0.0
                self._revive(index)
            else:
                self._pairs[index].break_off(f"the link of {self.rails[index].name} went down")

        return changed

    def _revive(self, index: int) -> None:
        if not self.rails[index].up and index not in self._reviving and not self.closed_for_good:
            task = asyncio.get_running_loop().create_task(self._bring_back(index))
            self._reviving[index] = task
            task.add_done_callback(lambda _: self._reviving.pop(index, None))

    async def _bring_back(self, index: int) -> None:
        rail, pair = self.rails[index], self._pairs[index]
        try:
            await self._ask("stopped", index, {"op": "stop", "rail": index})
            self._stopped(index)
            while not self.closed_for_good:
                await asyncio.sleep(max(0.0, rail.retry_at - time.monotonic()))
                try:
                    pair.reset()
                    mine = {"op": "start", "rail": index, "endpoint": pair.endpoint().to_json()}
                    answer = await self._ask("started", index, mine)
                    if not self._devices[index].active:
                        raise ValueError("the link is down")
                    self._join(index, answer.get("endpoint", answer.get("reason", "no endpoint")))
                    self._pump()
                    return
                except (VerbsError, ValueError, TimeoutError):
                    rail.postpone(time.monotonic())
        except (PeerLost, TimeoutError):
            return  # without an answer the connection ends, and with it this link

    def _stopped(self, index: int) -> None:
        for job in list(self._jobs):
            job.unsettled.discard(index)
            self._finish_if_idle(job)

    # --- the connection beside the rails

    async def _region(self, name: str) -> RemoteRegion:
        region = self._regions.get(name)
        if region is None:
            answer = await self._ask("region", name, {"op": "region", "name": name})
            if "reason" in answer:
                raise TransferError(str(answer["reason"]))
            region = RemoteRegion(int(answer["address"]), int(answer["nbytes"]), list(answer["keys"]))
            self._regions[name] = region
        return region

    async def _ask(self, answer: str, about: Any, question: Header) -> Header:
        """Raises PeerLost, TimeoutError."""
        key = (answer, about)
        future = self._asked.get(key)
        if future is None:
            future = self._asked[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda _: self._asked.pop(key, None))
            self.connection.send(question)
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.shield(future)

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return nowhere(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        if header["op"] == "gone":
            self._regions.pop(header["region"], None)
            return
        about = header.get("rail", header.get("name"))
        future = self._asked.get((header["op"], about))
        if future is not None and not future.done():
            future.set_result(header)

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end(reason or "it has closed")

    def end(self, reason: str) -> None:
        """Let go of the memory on this side and fail what is under way with PeerLost. Idempotent."""
        if self.closed_for_good:
            return
        self.closed_for_good = True
        for task in list(self._reviving.values()):
            task.cancel()
        for pair in self._pairs:
            pair.close()
        lost = PeerLost(f"lost {self.connection.peer_id!r} during a transfer: {reason}")
        for job in list(self._jobs):
            self._fail(job, lost)
        for future in list(self._asked.values()):
            if not future.done():
                future.set_exception(lost)
                future.exception()

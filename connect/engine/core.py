"""Core: one program's end of transfers between programs, on an event loop.

Another program is named by the address at which its Core listens. On one host the bytes are copied from process to
process (net/transfer/cma/process.py); otherwise, or where the kernel forbids that, they travel over RDMA if both
programs have it, or over TCP. connect/engine/mover.py chooses for each transfer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from connect.engine.answers import Answers
from connect.engine.borrowed_region import BorrowedRegion
from connect.engine.messages import DESCRIBE, NOTIFY, Description, Notify
from connect.engine.questions import ReadQuestion, WriteQuestion
from connect.engine.ranges import Ranges
from connect.engine.reach import Reach
from net.bodies import Nothing, answered, encode, typed
from net.channel.channel import Channel
from net.channel.links import Links
from net.errors import TransferError
from net.transfer.cma.process import Move, Offer, OtherProcess, Word
from net.transfer.common.transport import Op, Unusable
from net.transfer.engine import TransferEngine

log = logging.getLogger("mooncake.connect")

KIND = {"program": "mooncake.engine/1"}
ASK_S = 5.0
SILENCE_S = 30.0  # without a byte, a transfer over TCP has failed
TRANSFER_S = 60.0  # of one over RDMA


@dataclass(slots=True)
class Peer:
    """Another program, as far as it is known here."""

    node_id: str
    is_self: bool
    ranges: Ranges = field(default_factory=Ranges)
    count: int = -1  # of its word, when these were its ranges
    process: OtherProcess | None = None  # its memory can be copied
    by_rdma: bool = False


class Core:
    """Use it on one event loop."""

    def __init__(self, reach: Reach) -> None:
        self._channel = Channel(f"engine-{secrets.token_hex(8)}", KIND, _check)
        self._transfer = TransferEngine(self._channel, reach.order, reach.options)
        self._reach = reach
        self._word = Word()
        self._ranges = Ranges()
        self._regions: dict[str, BorrowedRegion] = {}
        self._names = count()
        self._peers: dict[str, Peer] = {}  # by session
        self._notices: list[Notify] = []
        self._answers = Answers(self._transfer.bulk, self._ranges)
        self._channel.handle(DESCRIBE, typed(Nothing, self._describe))
        self._channel.handle(NOTIFY, typed(Notify, self._notified))
        self._channel.on_lost(self._gone)
        self._channel.on_closed(self._gone)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        if self._reach.rdma and (reason := self._transfer.refusal("rdma")) is not None:
            log.warning("transfers use TCP and not RDMA: %s", reason)
        return (await self._channel.start(host, port))[1]

    @property
    def links(self) -> Links:
        """For connections of threads without an event loop."""
        return self._channel.links

    # --- memory

    async def register(self, address: int, nbytes: int) -> bool:
        """Peers may read and write it. False if it overlaps memory that is registered. Raises TransferError if a
        network card cannot use it."""
        name = f"memory-{next(self._names)}"
        if not self._ranges.add(address, nbytes, name):
            return False
        self._lend(name, address, nbytes)
        self._word.step()
        try:
            await self._transfer.pin(name)
        except TransferError:
            self.unregister(address)
            raise
        return True

    def unregister(self, address: int) -> bool:
        """False if no registered memory begins there. A copy by a process of this host that has begun may still end."""
        name = self._ranges.remove(address)
        if name is None:
            return False
        self._word.step()
        self._take_back(name)
        return True

    def holds(self, moves: Sequence[Move]) -> bool:
        """Whether the remote side of all of them is registered here."""
        return all(self._ranges.find(remote, length) is not None for _, remote, length in moves)

    def _lend(self, name: str, address: int, nbytes: int) -> None:
        region = self._regions[name] = BorrowedRegion(name, address, nbytes)
        self._transfer.register(region)

    def _take_back(self, name: str) -> None:
        self._transfer.unregister(name)
        self._regions.pop(name).close()

    # --- peers

    def known(self, session: str) -> Peer | None:
        """The program, if this one has an open path to it. Any thread may ask."""
        return self._peers.get(session)

    async def peer(self, session: str) -> Peer:
        """The program that listens at `session`, HOST:PORT. Raises ValueError, TransferError, PeerLost, PeerRefused,
        RemoteError, TimeoutError."""
        known = self._peers.get(session)
        if known is None:
            host, _, port = session.rpartition(":")
            node_id = await self._channel.connect((host.strip("[]"), int(port)))
            known = Peer(node_id, node_id == self._channel.node_id)
            description = await self._refresh(known)
            if not known.is_self:
                known.process = self._process(session, description)
            if not known.is_self and known.process is None:
                path = await self._transfer.open(node_id)
                known.by_rdma = path.transport == "rdma"
                log.info("transfers with %s: %s", session, path.why())
            self._peers[session] = known
        return known

    def _process(self, session: str, description: Description) -> OtherProcess | None:
        if not self._reach.cma or not description.boot:
            return None
        offer = Offer(description.boot, description.pid, description.address, description.proof, description.memfd)
        try:
            return OtherProcess.of(offer)
        except Unusable as error:
            log.info("no copies between processes with %s: %s", session, error)
            return None

    async def _refresh(self, peer: Peer) -> Description:
        reply, _ = await self._channel.call(peer.node_id, DESCRIBE, encode(Nothing()), timeout_s=ASK_S)
        description = answered(Description, reply)
        peer.ranges, peer.count = Ranges(description.ranges), description.count
        return description

    async def _describe(self, asker: str, body: Nothing, data: memoryview) -> Description:
        rows, changes = self._ranges.rows(), self._word.count
        if not self._reach.cma:
            return Description(rows, changes)
        try:
            return Description(rows, changes, *self._word.offer())
        except OSError:  # the kernel hides the host's identity
            return Description(rows, changes)

    def _gone(self, node_id: str) -> None:
        for session in [session for session, peer in self._peers.items() if peer.node_id == node_id]:
            del self._peers[session]

    async def refresh(self, peer: Peer) -> None:
        """Ask which memory it has registered now."""
        await self._refresh(peer)

    async def probe(self, session: str) -> None:
        """Raises what `peer` raises unless the program answers."""
        peer = await self.peer(session)
        await self._refresh(peer)

    # --- transfers

    async def ask(self, peer: Peer, question: ReadQuestion | WriteQuestion) -> None:
        """Raises TransferError, PeerLost, PeerRefused, RemoteError, TimeoutError."""
        await self._transfer.bulk.ask(peer.node_id, question, SILENCE_S, SILENCE_S)

    async def move_by_card(self, peer: Peer, op: Op, moves: Sequence[Move]) -> None:
        """Over RDMA, or over TCP if that has failed meanwhile. Every remote range must be registered there. Raises
        TransferError, PeerLost, RemoteError, TimeoutError."""
        try:
            await self._submit(peer, op, moves)
        except TransferError:  # it may have registered memory since
            before = peer.ranges.rows()
            await self._refresh(peer)
            if peer.ranges.rows() == before:
                raise
            await self._submit(peer, op, moves)

    async def _submit(self, peer: Peer, op: Op, moves: Sequence[Move]) -> None:
        lent: list[str] = []
        groups: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        try:
            for (local, _, length), (remote, there) in zip(moves, locate(peer, moves), strict=True):
                found = self._ranges.find(local, length)
                if found is None:  # memory that is not registered here: lent for this call, under a name nobody knows
                    found = f"lent-{secrets.token_hex(8)}", 0
                    self._lend(found[0], local, length)
                    lent.append(found[0])
                groups.setdefault((found[0], remote), []).append((found[1], there, length))
            work = [
                self._transfer.submit(peer.node_id, op, here, there, spans, timeout_s=TRANSFER_S)
                for (here, there), spans in groups.items()
            ]
            ends = await asyncio.gather(*work, return_exceptions=True)  # all have ended before memory is taken back
            for error in ends:
                if isinstance(error, BaseException):
                    raise error
        finally:
            for name in lent:
                self._take_back(name)

    # --- notices and life

    async def notify(self, peer: Peer, notice: Notify) -> None:
        """It will find the notice. Raises PeerLost, RemoteError, TimeoutError."""
        await self._channel.call(peer.node_id, NOTIFY, encode(notice), timeout_s=ASK_S)

    async def _notified(self, sender: str, body: Notify, data: memoryview) -> None:
        self._notices.append(body)

    def take_notices(self) -> list[Notify]:
        """Those that have arrived since the last call."""
        notices, self._notices = self._notices, []
        return notices

    async def close(self) -> None:
        """Idempotent."""
        await self._transfer.close()
        await self._channel.close()
        for region in self._regions.values():
            region.close()
        self._word.close()


def _check(hello: dict[str, Any]) -> str | None:
    return None if hello.get("program") == KIND["program"] else "it is no transfer engine of a program"


def locate(peer: Peer, moves: Sequence[Move]) -> list[tuple[str, int]]:
    """(region, offset) at the peer for every move. Raises TransferError for memory that is not registered there."""
    out = []
    for _, remote, length in moves:
        found = peer.ranges.find(remote, length)
        if found is None:
            raise TransferError(f"{length} bytes at {remote:#x} are not registered there")
        out.append(found)
    return out

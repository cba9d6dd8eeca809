"""Core: one program's end of transfers between programs, on an event loop.

Another program is named by the address at which its Core listens. On one host the bytes are copied from process to
process (net/transfer/cma/process.py); otherwise, or where the kernel forbids that, they travel over TCP.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from connect.engine.borrowed_region import BorrowedRegion
from connect.engine.messages import DESCRIBE, NOTIFY, Description, Notify
from connect.engine.ranges import Ranges
from net.bodies import Nothing, answered, encode, typed
from net.channel.channel import Channel
from net.errors import TransferError
from net.transfer.cma.process import Move, Offer, OtherProcess, Word
from net.transfer.common.transport import Op, Unusable
from net.transfer.engine import TransferEngine

log = logging.getLogger("mooncake.connect")

KIND = {"program": "mooncake.engine/1"}
ASK_S = 5.0
TRANSFER_S = 60.0


@dataclass(slots=True)
class Peer:
    """Another program, as far as it is known here."""

    node_id: str
    ranges: Ranges = field(default_factory=Ranges)
    count: int = -1  # of its word, when these were its ranges
    process: OtherProcess | None = None


class Core:
    """Use it on one event loop. With `tcp_only` no memory is copied from process to process."""

    def __init__(self, tcp_only: bool = False) -> None:
        self._channel = Channel(f"engine-{secrets.token_hex(8)}", KIND, _check)
        self._transfer = TransferEngine(self._channel, ("tcp",))
        self._tcp_only = tcp_only
        self._word = Word()
        self._ranges = Ranges()
        self._regions: dict[str, BorrowedRegion] = {}
        self._names = count()
        self._peers: dict[str, Peer] = {}  # by session
        self._notices: list[Notify] = []
        self._channel.handle(DESCRIBE, typed(Nothing, self._describe))
        self._channel.handle(NOTIFY, typed(Notify, self._notified))
        self._channel.on_lost(self._gone)
        self._channel.on_closed(self._gone)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        return (await self._channel.start(host, port))[1]

    # --- memory

    def register(self, address: int, nbytes: int) -> bool:
        """Peers may read and write it. False if it overlaps memory that is registered."""
        name = f"memory-{next(self._names)}"
        if not self._ranges.add(address, nbytes, name):
            return False
        self._lend(name, address, nbytes)
        self._word.step()
        return True

    def unregister(self, address: int) -> bool:
        """False if no registered memory begins there. A copy by a process of this host that has begun may still end."""
        name = self._ranges.remove(address)
        if name is None:
            return False
        self._word.step()
        self._take_back(name)
        return True

    def _lend(self, name: str, address: int, nbytes: int) -> None:
        region = self._regions[name] = BorrowedRegion(name, address, nbytes)
        self._transfer.register(region)

    def _take_back(self, name: str) -> None:
        self._transfer.unregister(name)
        self._regions.pop(name).close()

    # --- peers

    async def peer(self, session: str) -> Peer:
        """The program that listens at `session`, HOST:PORT. Raises ValueError, TransferError, PeerLost, PeerRefused,
        RemoteError, TimeoutError."""
        known = self._peers.get(session)
        if known is None:
            host, _, port = session.rpartition(":")
            known = Peer(await self._channel.connect((host.strip("[]"), int(port))))
            description = await self._refresh(known)
            known.process = self._process(session, description)
            self._peers[session] = known
        return known

    def _process(self, session: str, description: Description) -> OtherProcess | None:
        if self._tcp_only or not description.boot:
            return None
        offer = Offer(description.boot, description.pid, description.address, description.proof)
        try:
            return OtherProcess.of(offer)
        except Unusable as error:
            log.info("transfers with %s use TCP and not copies between processes: %s", session, error)
            return None

    async def _refresh(self, peer: Peer) -> Description:
        reply, _ = await self._channel.call(peer.node_id, DESCRIBE, encode(Nothing()), timeout_s=ASK_S)
        description = answered(Description, reply)
        peer.ranges, peer.count = Ranges(description.ranges), description.count
        return description

    async def _describe(self, asker: str, body: Nothing, data: memoryview) -> Description:
        rows, changes = self._ranges.rows(), self._word.count
        if self._tcp_only:
            return Description(rows, changes)
        try:
            return Description(rows, changes, *self._word.offer())
        except OSError:  # the kernel hides the host's identity
            return Description(rows, changes)

    def _gone(self, node_id: str) -> None:
        for session in [session for session, peer in self._peers.items() if peer.node_id == node_id]:
            del self._peers[session]

    # --- transfers

    def known(self, session: str) -> Peer | None:
        """The program, if this one has an open path to it. Any thread may ask."""
        return self._peers.get(session)

    async def refresh(self, peer: Peer) -> None:
        """Ask which memory it has registered now."""
        await self._refresh(peer)

    async def move_over_tcp(self, peer: Peer, op: Op, moves: Sequence[Move]) -> None:
        """Every remote range must be registered there. Raises TransferError, PeerLost, RemoteError, TimeoutError."""
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
            for (local_name, remote), spans in groups.items():
                await self._transfer.submit(peer.node_id, op, local_name, remote, spans, timeout_s=TRANSFER_S)
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

    async def probe(self, session: str) -> None:
        """Raises what `peer` raises unless the program answers."""
        peer = await self.peer(session)
        await self._refresh(peer)

    async def close(self) -> None:
        """Idempotent."""
        await self._transfer.close()
        await self._channel.close()
        for region in self._regions.values():
            region.close()


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

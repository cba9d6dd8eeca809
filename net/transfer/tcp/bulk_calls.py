"""BulkCalls: the node's bulk calls (net/transfer/tcp/bulk_call.py) to peers that it reaches over TCP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from net.errors import PeerLost
from net.loop.clock import Clock
from net.loop.deadlines import Deadlines
from net.loop.tasks import awaited
from net.transfer.common.path import Path, Reached
from net.transfer.common.traffic import RailLimit
from net.transfer.common.transport import BULK, Transport
from net.transfer.tcp.bulk_call import Answerer, BulkCall, Receiver, Services
from net.transfer.tcp.transport import Tcp

log = logging.getLogger("mooncake.net")

RETRY_PAUSE_S = 5.0  # between two attempts to connect to a peer


class BulkCalls:
    """The bulk calls of a transfer engine, which passes its `open`, `path_of` and record of a peer."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        open_path: Callable[[str], Awaitable[Path]],
        path_of: Callable[[str], Path | None],
        peer: Callable[[str], Reached],
        limit: RailLimit | None,
        clock: Clock,
    ) -> None:
        tcp = transports.get("tcp")
        self._tcp = tcp if isinstance(tcp, Tcp) else None
        self._alone = self._tcp is not None and len(transports) == 1
        self._open, self._path_of, self._peer = open_path, path_of, peer
        self._limit, self._clock = limit, clock
        self._deadlines = Deadlines()
        self._opening: dict[str, asyncio.Task[str]] = {}
        self._rest_until: dict[str, float] = {}  # peers to which a connection was tried recently
        self._services = Services() if self._tcp is None else self._tcp.services

    def answer(self, kind: str, answerer: Answerer) -> None:
        """Register the answerer of questions of `kind` without bytes. It is called on the event loop."""
        self._services.answers[kind] = answerer

    def receive(self, kind: str, receiver: Receiver) -> None:
        """Register the receiver of questions of `kind` with bytes."""
        self._services.receives[kind] = receiver

    def reaches(self, peer_id: str) -> bool:
        """Whether the peer takes bulk calls: its path is TCP, or TCP is the only transport."""
        path = self._path_of(peer_id)
        return path.transport == "tcp" if path is not None else self._alone

    def reaches_same_host(self, peer_id: str) -> bool:
        """Whether a peer with a shared-memory path also takes bulk calls. If it has no data connection, this starts to
        open one and returns False. Always False with a cluster key: sealing costs more than the call saves."""
        path = self._path_of(peer_id)
        if self._tcp is None or self._tcp.sealed or path is None or path.transport != "shm":
            return False
        if self._tcp.is_open(peer_id):
            return True
        if peer_id not in self._opening and asyncio.get_running_loop().time() >= self._rest_until.get(peer_id, 0.0):
            self._rest_until[peer_id] = asyncio.get_running_loop().time() + RETRY_PAUSE_S
            task = self._opening[peer_id] = awaited(self._tcp.open(peer_id, {}))
            task.add_done_callback(lambda done: self._opened(peer_id, done))
        return False

    def _opened(self, peer_id: str, done: asyncio.Task[str]) -> None:
        self._opening.pop(peer_id, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.debug("no data connection to %s in addition to its shared memory: %r", peer_id, error)

    async def ask(self, peer_id: str, call: BulkCall, silence_s: float, timeout_s: float, priority: int = BULK) -> None:
        """Ask, and wait until `call` contains the answer. `timeout_s`: until the answer begins; `silence_s`: then the
        longest time without new bytes. Raises RemoteError, TransferError, PeerLost, PeerRefused, TimeoutError; then no
        byte of it moves any more, but the peer may have handled a question with bytes."""
        assert self._tcp is not None
        started = self._clock.now()
        peer = self._peer(peer_id)
        if self._limit is not None:
            nbytes = round(call.expected * self._tcp.share(peer_id))
            await self._clock.until(started + self._limit.hold_s(started, nbytes, priority > BULK))
        deadline = self._deadlines.start(timeout_s)
        call.limit(deadline, silence_s)
        try:
            if self._path_of(peer_id) is None:
                await self._open(peer_id)
            await self._tcp.ask(peer_id, call, priority)
        except asyncio.CancelledError:
            peer.traffic.failures += 1
            if not deadline.was_hit():
                raise
            if self._path_of(peer_id) is None:
                raise PeerLost(f"lost {peer_id!r} during {call.kind!r}") from None
            raise TimeoutError(f"{peer_id!r} did not answer {call.kind!r} within {timeout_s:g} s") from None
        except BaseException:
            peer.traffic.failures += 1
            raise
        finally:
            self._deadlines.end(deadline)
        read = call.moved > 0
        peer.traffic.done(read, call.moved if read else call.expected, self._clock.now() - started)

    async def close(self) -> None:
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        self._deadlines.close()

"""The data connections to one peer: slices are striped over them and resent on another one if a connection breaks.

A broken connection is dialed again, with growing pauses. The peer is lost only if its control connection breaks, or if
no data connection can be opened. A WRITE that was sent again is complete only after the peer has confirmed that it
receives nothing more on the broken connection: late bytes could land in memory that has been reused. Until then, the
WRITE is unsettled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from net.errors import PeerLost, PeerRefused, TransferError
from net.loop.tasks import awaited, keep, spawn
from net.transfer.common import rails
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.rails import Rail
from net.transfer.common.spans import Cursor, Span, sides, slices, total
from net.transfer.common.transport import Op
from net.transfer.tcp.bulk_call import BulkCall
from net.transfer.tcp.rail import CANCEL_S, RailBroken, TcpRail, Unresponsive

SLICE_BYTES = 4 << 20  # of a large transfer, sent over one connection
SLICES_IN_FLIGHT = 2  # of one transfer per connection: the next one is requested before the last has arrived
SLICE_ATTEMPTS = 9  # of one slice
REDIAL_S = 10.0  # without any connection for this long, the peer is given up
WANTED_S = 0.5  # between two attempts to reopen a connection while a transfer waits for it


class Bundle:
    """`dial` opens one more connection. `give_up` drops the peer, which ends this bundle."""

    def __init__(
        self,
        peer_id: str,
        names: Sequence[str],
        dial: Callable[[], Awaitable[TcpRail]],
        give_up: Callable[[str], None],
    ) -> None:
        self.peer_id = peer_id
        self.rails = [Rail(name) for name in names]
        self.ended: Exception | None = None
        self._dial = dial
        self._give_up = give_up
        self._open: list[TcpRail | None] = [None] * len(names)
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # a rail came up, or the bundle ended
        self._waiting = 0  # transfers without a connection

    async def open(self) -> None:
        """Open the first connection; background tasks open the others. Raises PeerLost, PeerRefused."""
        await self._connect(0)
        for index in range(1, len(self.rails)):
            self._revive(index)

    @property
    def alive(self) -> bool:
        """It has a connection, or is reopening one."""
        return self.ended is None and (self.is_open or bool(self._reviving))

    @property
    def is_open(self) -> bool:
        return any(self._open)  # all None after the end

    def connections(self) -> list[TcpRail]:
        return [rail for rail in self._open if rail is not None]

    def submit(
        self,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        landed: LandedSpans | None = None,
        rank: int | None = None,
    ) -> Coroutine[Any, Any, None]:
        """See net.transfer.common.transport.Transport; `rank`: another one than the connections'."""
        nbytes = total(spans)
        if nbytes <= SLICE_BYTES:
            return self._slice(op, local, remote, spans, nbytes, landed, rank)
        pieces = slices(spans, SLICE_BYTES)

        async def work() -> None:
            for piece in pieces:  # cut only when a connection is free: the first is sent immediately
                await self._slice(op, local, remote, piece, total(piece), landed, rank)

        return _all([work() for _ in range(min(-(-nbytes // SLICE_BYTES), SLICES_IN_FLIGHT * len(self.rails)))])

    def ask(self, call: BulkCall, rank: int | None = None) -> Coroutine[Any, Any, None]:
        """See net.transfer.tcp.bulk_call. Also raises RemoteError."""
        return self._on_a_rail(call.expected, lambda rail, broken: self._ask_on(rail, call, broken, rank))

    async def _ask_on(self, rail: TcpRail, call: BulkCall, broken: set[int], rank: int | None) -> None:
        """Before the question's bytes are sent again, the peer must know that those on broken connections are void: it
        has reserved memory for them."""
        if broken:
            await self._settled(broken)
            broken.clear()
        await rail.ask(call, broken, rank)

    def _slice(
        self,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        nbytes: int,
        landed: LandedSpans | None,
        rank: int | None,
    ) -> Coroutine[Any, Any, None]:
        here, there = sides(spans)

        def work(rail: TcpRail, unsettled: set[int]) -> Coroutine[Any, Any, None]:
            if local.closed:  # during the wait for a connection
                raise TransferError(f"region {local.name!r} is not registered here")
            if op is Op.READ:
                return rail.read(Cursor(local.memory, here), remote, there, rank)
            return rail.write(Cursor(local.memory, here), remote, there, unsettled, rank)

        return self._on_a_rail(nbytes, work, None if landed is None else partial(landed.add, spans))

    async def _on_a_rail(
        self,
        nbytes: int,
        work: Callable[[TcpRail, set[int]], Coroutine[Any, Any, None]],
        done: Callable[[], None] | None = None,
    ) -> None:
        """Run `work` on the best connection, and again on another one if that breaks. `work` adds connections whose
        bytes may still land to its second argument."""
        unsettled: set[int] = set()
        try:
            for _ in range(SLICE_ATTEMPTS):
                index, rail = self._ready(nbytes) or await self._choose(nbytes)
                state = self.rails[index]
                state.sent(time.monotonic(), nbytes)
                try:
                    await work(rail, unsettled)
                    if self._open[index] is rail:
                        state.arrived(time.monotonic(), nbytes)
                    if done is not None:
                        done()
                    return
                except RailBroken:
                    state.resent += 1
                except BaseException:
                    if self._open[index] is rail:
                        state.in_flight -= nbytes
                    raise
            raise TransferError(f"a slice failed {SLICE_ATTEMPTS} times, last on {state.name}")
        except Unresponsive as error:
            self._give_up(str(error))
            raise asyncio.CancelledError from None
        finally:
            if unsettled and self.ended is None:
                await self._settled(unsettled)

    def _ready(self, nbytes: int) -> tuple[int, TcpRail] | None:
        """The connection that would finish `nbytes` first; None if all are broken."""
        index = rails.choose(self.rails, nbytes)
        rail = None if index is None else self._open[index]
        return None if index is None or rail is None or rail.ended else (index, rail)

    async def _choose(self, nbytes: int) -> tuple[int, TcpRail]:
        """Wait until `_ready` returns a connection. Raises PeerLost."""
        give_up_at = time.monotonic() + REDIAL_S
        while True:
            if self.ended is not None:
                raise PeerLost(str(self.ended))
            if (ready := self._ready(nbytes)) is not None:
                return ready
            self._changed.clear()
            self._waiting += 1
            try:
                async with asyncio.timeout(give_up_at - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                self._give_up(f"no data connection within {REDIAL_S:g} s")
            finally:
                self._waiting -= 1

    # --- broken connections

    async def _settled(self, unsettled: set[int]) -> None:
        """Return when no byte lands from these rails any more, even if cancelled. If the peer does not confirm this,
        the bundle ends."""
        task = spawn(self._cut(unsettled), "cutting off broken data connections")
        cancelled = False
        give_up_at = time.monotonic() + CANCEL_S
        while not task.done() and (left := give_up_at - time.monotonic()) > 0:
            try:
                await asyncio.wait([task], timeout=left)
            except asyncio.CancelledError:
                cancelled = True
        if not task.done():
            task.cancel()
            self._give_up(f"a broken data connection is not confirmed within {CANCEL_S:g} s")
        if self.ended is not None and not cancelled:
            raise PeerLost(str(self.ended))
        if cancelled:
            raise asyncio.CancelledError

    async def _cut(self, rail_ids: set[int]) -> None:
        try:
            for rail_id in rail_ids:
                while True:
                    _, rail = await self._choose(0)
                    try:
                        await rail.cut(rail_id)
                        break
                    except RailBroken:
                        continue
        except PeerLost:
            pass  # the bundle has ended: the other side's fence does this

    async def _connect(self, index: int) -> None:
        rail = await self._dial()
        if self.ended is not None or rail.ended:
            rail.connection.abort()
            raise PeerLost(f"lost {self.peer_id!r} while opening a data connection")
        self._open[index] = rail
        rail.on_end(lambda reason: self._lost(index, rail, reason))
        self.rails[index].opened()
        self._changed.set()

    def _lost(self, index: int, rail: TcpRail, reason: str | None) -> None:
        if self.ended is not None:
            return
        if reason is None:
            self.end("it has closed", abort=False)
        elif self._open[index] is rail:
            self._open[index] = None
            self.rails[index].failed(time.monotonic())
            if not self.is_open:
                self.rails[index].retry_at = 0.0  # a transfer may wait for it
            self._revive(index)

    def _revive(self, index: int) -> None:
        if index not in self._reviving and self.ended is None:
            task = keep(partial(self._bring_back, index), "reopening a data connection")
            self._reviving[index] = task
            task.add_done_callback(lambda _: self._reviving.pop(index, None))

    async def _bring_back(self, index: int) -> None:
        state = self.rails[index]
        while self.ended is None:
            while (left := state.retry_at - time.monotonic()) > 0:
                await asyncio.sleep(min(left, WANTED_S))
                if self._waiting:
                    break
            try:
                await self._connect(index)
                return
            except (PeerLost, PeerRefused):
                state.postpone(time.monotonic())

    def end(self, reason: str, abort: bool) -> None:
        """Fail the running transfers with PeerLost and close every connection. Idempotent."""
        if self.ended is not None:
            return
        self.ended = PeerLost(f"lost {self.peer_id!r} during a transfer: {reason}")
        for task in list(self._reviving.values()):
            task.cancel()
        for rail in self.connections():
            rail.end(self.ended)
            if abort:
                rail.connection.abort()
            else:
                rail.connection.close()
        self._open = [None] * len(self._open)
        self._changed.set()


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently. If one fails, or this is cancelled, cancel the others and wait for their end."""
    tasks = [awaited(one) for one in work]
    cancelled = False
    waiting = set(tasks)
    while waiting:
        try:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.cancelled() or task.exception() is not None for task in done)
        except asyncio.CancelledError:
            cancelled = failed = True
        if failed:
            for task in waiting:
                task.cancel()
    errors = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled or (not any(errors) and any(task.cancelled() for task in tasks)):
        raise asyncio.CancelledError
    for error in errors:
        if error is not None:
            raise error

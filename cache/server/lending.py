"""Lending: slots of this node's share that processes on this host fill on their own (cache/index/loans.py).

A put then asks nobody: the process copies the block into a lent slot and announces it. So every question about blocks
first takes in what was announced (`settle`). A timer does the same, as long as blocks keep coming: then the SSD tier
and readers of the index get them, and the borrowers get other slots.

While keys are passed on (their writers were sent to another member, which may have a value of the key), the loans are
CLOSED: borrowers ask, as all writers do.

A borrower keeps its slots until it is lost or leaves. They return when it can write into them no more, with the blocks
that it announced until then. All loans together take at most LENT_SHARE of the arena, and LENT_MAX slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.index.loans import ASLEEP, AWAKE, CLOSED, PAGE_ROWS, PAGES, Filled, Loans
from cache.messages import FILLED, LEND, Lent
from cache.recent import Recent
from cache.tiers.local_store import LocalStore, NoSpace
from net.bodies import Nothing, typed
from net.channel.channel import Channel
from net.loop.clock import loop_time
from net.loop.tasks import spawn
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

LENT_SHARE = 1 / 8
LENT_MAX = 256  # slots: all may be announced at once, and each takes this node about 10 us
PERIOD_S = 0.001  # between two looks for announcements
AWAKE_S = 0.2  # without announcements, until this node looks no more on its own


@dataclass(slots=True)
class Loan:
    """The page of one borrower, and the slots that its rows lend."""

    page: int
    slots: dict[int, int] = field(default_factory=dict)


class Lending:
    """The loans of `local`. `stored(key)` is called for each block that a borrower has added; none is added whose key
    is in `passed_on`. Nothing is lent where tenants have quotas, because a put must then ask first, or where the arena
    cannot be mapped by others."""

    def __init__(
        self,
        channel: Channel,
        transfer: TransferEngine,
        local: LocalStore,
        stored: Callable[[BlockKey], None],
        passed_on: Recent,
    ) -> None:
        self._transfer = transfer
        self._local = local
        self._stored = stored
        self._passed_on = passed_on
        self._ended = False
        self._loans: dict[str, Loan] = {}
        self._returning: dict[asyncio.Task[None], Loan] = {}  # their borrowers are gone, but may still write
        self._pages = list(range(PAGES))
        self._rows: Loans | None = None
        self._seen = 0  # announcements
        self._timer: asyncio.TimerHandle | None = None
        self._awake_until = 0.0
        arena = local.arena
        self._most = (
            0 if arena is None or local.index_region is None else min(LENT_MAX, int(LENT_SHARE * arena.num_slots))
        )
        if self._most and not local.has_quotas:
            self._rows = Loans.new()
            transfer.register(self._rows.region)
        channel.handle(LEND, typed(Nothing, self._lend))
        channel.handle(FILLED, typed(Nothing, self._filled))
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    def __len__(self) -> int:
        """Slots that are lent now."""
        return sum(len(loan.slots) for loan in self._all())

    def settle(self) -> None:
        """What was announced until now becomes blocks."""
        rows = self._rows
        if rows is None or (announced := rows.announced) == self._seen:
            return
        self._seen, end = announced, rows.next_number
        found = [(one, loan) for loan in self._all() for one in rows.filled(loan.page)]
        for one, loan in sorted(found, key=lambda row: row[0].number):
            if one.number < end:  # a later one may follow one in a page that was looked at before
                self._enter(rows, loan, one)
        for loan in self._loans.values():
            self._fill(rows, loan)

    def pause(self) -> bool:
        """Before keys are passed on: take in what was announced, and lend nothing more while any is. Returns whether
        blocks came."""
        seen = self._seen
        if self._rows is not None:
            self._rows.mood = CLOSED
            self.settle()
        return self._seen != seen

    def end(self) -> None:
        """Lend no more, and take in the last blocks. Borrowers put elsewhere what they announce later. Idempotent."""
        self._ended = True
        self.pause()

    async def close(self) -> None:
        """Take everything back. Close the channel and the transfer engine first. Idempotent."""
        self.end()
        loans, tasks = self._all(), list(self._returning)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for loan in loans:
            self._release(loan)
        self._loans.clear()
        self._returning.clear()
        if self._rows is not None:
            self._rows.close()
            self._rows.region.close()
            self._rows = None

    # --- messages

    async def _lend(self, peer: str, body: Nothing, data: memoryview) -> Lent:
        rows = self._rows
        if rows is None or self._ended or self._passed_on.any(loop_time()):
            return Lent(-1)
        self._wake(rows)
        loan = self._loans.get(peer)
        if loan is None:
            if not self._pages:
                return Lent(-1)
            loan = self._loans[peer] = Loan(self._pages.pop())
        self._fill(rows, loan)
        return Lent(loan.page)

    async def _filled(self, peer: str, body: Nothing, data: memoryview) -> None:
        self.settle()
        if self._rows is not None and self._rows.mood != CLOSED:
            self._wake(self._rows)

    # --- looking

    def _wake(self, rows: Loans) -> None:
        rows.mood = AWAKE
        self._awake_until = loop_time() + AWAKE_S
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        self._timer, rows = None, self._rows
        if rows is None or rows.mood == CLOSED:
            return
        seen, slept = self._seen, rows.mood == ASLEEP
        self.settle()
        if self._seen != seen:
            self._wake(rows)
        elif slept:  # for a whole period: a borrower that announces now sees that
            return
        else:
            if loop_time() >= self._awake_until:
                rows.mood = ASLEEP
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    # --- loans

    def _all(self) -> list[Loan]:
        return [*self._loans.values(), *self._returning.values()]

    def _enter(self, rows: Loans, loan: Loan, one: Filled) -> None:
        slot = loan.slots.pop(one.row, None)
        rows.clear(loan.page, one.row)
        if slot is None:
            return
        try:
            # One that is passed on was announced after `pause`: its borrower has seen that, and asks.
            asks = self._passed_on.has(loop_time(), one.key)
            if not asks and self._local.enter_lent(one.key, slot, one.checksum, one.length):
                self._stored(one.key)
        except ValueError as error:
            log.warning("a process of this host announced an impossible block: %s", error)
        self._local.reservations.take_back(slot)

    def _fill(self, rows: Loans, loan: Loan) -> None:
        """Lend slots in free rows: a borrower gets half of what the others leave. So an idle one leaves room for the
        next ones, but each of these gets less, and some ten idle ones leave nothing."""
        if rows.mood == CLOSED:
            return
        left = self._most - len(self) + len(loan.slots)
        most = min(PAGE_ROWS, -(-left // 2))
        if len(loan.slots) >= most:
            return
        for row in range(PAGE_ROWS):
            if row in loan.slots:
                continue
            try:
                loan.slots[row] = self._local.reservations.lend()
            except NoSpace:
                return
            rows.lend(loan.page, row, loan.slots[row])
            if len(loan.slots) >= most:
                return

    def _gone(self, peer: str) -> None:
        loan = self._loans.pop(peer, None)
        if loan is not None:
            task = spawn(self._take_back(peer, loan), "taking lent slots back")
            self._returning[task] = loan
            task.add_done_callback(lambda done: self._returning.pop(done, None))

    async def _take_back(self, peer: str, loan: Loan) -> None:
        while True:
            try:
                await self._transfer.fence(peer)
                break
            except TimeoutError as error:
                log.warning("%d lent slots are still held: %s", len(loan.slots), error)
        self._seen = -1  # its last announcement may be incomplete: look at the rows
        self.settle()
        self._release(loan)
        self._pages.append(loan.page)

    def _release(self, loan: Loan) -> None:
        for row, slot in loan.slots.items():
            if self._rows is not None:
                self._rows.clear(loan.page, row)
            self._local.reservations.take_back(slot)
        loan.slots.clear()

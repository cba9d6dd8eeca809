"""LentSlots: puts into slots that homes of this host have lent to this process (cache/index/loans.py).

One copy, which also computes the checksum, and no question: the home takes the block in before it answers anybody. What
a home has not lent goes to it with a question (cache/quick/quick_put.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from ctypes import addressof, c_char
from functools import partial
from threading import Lock

from cache.block import BlockKey
from cache.index.loans import ASLEEP, CLOSED, LENT, SHORT_BYTES, Loans, LoanWrite
from cache.quick.routes import Routes
from net.compiled import NotCompiled
from net.transfer.common.holds import Hold
from net.transfer.common.memory import Region

log = logging.getLogger(__name__)

ASK_PAUSE_S = 0.5  # between two questions for slots to a home
ODD_PAUSE_S = 60.0  # after a home whose slots do not fit
POPULATE_MIN = 64 << 10  # bytes, as in net/transfer/shm/transport.py


class Borrowed:
    """The slots of `page` in `arena`, as its home lends them."""

    def __init__(self, loans: Loans, page: int, arena: Region) -> None:
        self.loans, self.page, self.arena = loans, page, arena
        self._free: deque[int] = deque()
        self._mine: set[int] = set()  # rows in `_free`, and rows that a thread fills
        self._lock = Lock()
        self._written: set[int] = set()  # slots whose pages are mapped in this process

    def claim(self) -> int | None:
        """A lent row, until `done`."""
        with self._lock:
            if not self._free:
                rows = [row for row, state in enumerate(self.loans.states(self.page)) if state == LENT]
                self._free.extend(row for row in rows if row not in self._mine)
                self._mine.update(self._free)
            return self._free.popleft() if self._free else None

    def done(self, row: int) -> None:
        """If the row was announced, it is lent again when its home says so."""
        with self._lock:
            self._mine.discard(row)

    def target(self, row: int, slot_bytes: int, nbytes: int) -> int | None:
        """The address of the slot; None if it is outside the arena."""
        slot = self.loans.slot(self.page, row)
        start = slot * slot_bytes
        if start + slot_bytes > self.arena.nbytes:
            return None
        if nbytes >= POPULATE_MIN and slot not in self._written:
            self._written.add(slot)
            self.arena.populate(start, slot_bytes)
        return self.arena.address + start


class LentSlots:
    """Any thread may call. Create it on the event loop."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._borrowed: dict[str, Borrowed] = {}
        self._ask_after: dict[str, float] = {}
        self._code: LoanWrite | None = None
        self._usable = True
        routes.on_forget(self._forget)

    def put(self, home: str, key: BlockKey, pieces: Sequence[memoryview], nbytes: int) -> bool:
        """Whether the block, `nbytes` in writable pieces of memory, is at the home now. If not, it may still be: put it
        with a question."""
        if not SHORT_BYTES < nbytes <= self._routes.block_bytes or any(piece.readonly for piece in pieces):
            return False
        one, code, known = self._borrowed.get(home), self._code, self._routes.memory_of(home)
        if one is None or code is None or known is None or known[2] is not one.arena or one.loans.mood == CLOSED:
            self._ask(home)
            return False
        row = one.claim()
        if row is None:
            self._ask(home)
            return False
        try:
            hold = self._routes.hold(home)
            mood = None if hold is None else self._fill(code, one, row, hold, key, pieces, nbytes)
        finally:
            one.done(row)
        if mood == ASLEEP:
            self._routes.announced(home)
        return mood is not None and mood != CLOSED

    def _fill(
        self,
        code: LoanWrite,
        one: Borrowed,
        row: int,
        hold: Hold,
        key: BlockKey,
        pieces: Sequence[memoryview],
        nbytes: int,
    ) -> int | None:
        """Ends the hold. Returns the mood of the home that has the block now; None if it may be lost."""
        try:
            try:
                mapped = one.arena.memory[:0]  # an exported buffer keeps the mapping
            except ValueError:  # closed just now
                return None
            with mapped:
                target = one.target(row, self._routes.block_bytes, nbytes)
                if target is None:
                    return None
                places = [(addressof(c_char.from_buffer(piece)), len(piece)) for piece in pieces if len(piece)]
                mood = code.fill(one.loans, one.loans.address(one.page, row), target, places, nbytes, key)
                return None if hold.has_news() else mood
        finally:
            hold.release()

    def _ask(self, home: str) -> None:
        now = time.monotonic()
        if self._usable and self._routes.is_near(home) and now >= self._ask_after.get(home, 0.0):
            self._ask_after[home] = now + ASK_PAUSE_S
            self._routes.borrow(home, partial(self._answered, home))

    def _answered(self, home: str, answer: tuple[Region, int] | None) -> None:
        """On the event loop."""
        known = self._routes.memory_of(home)
        if answer is None or known is None:
            return
        region, page = answer
        one = self._borrowed.get(home)
        if one is not None and one.loans.region is region and one.page == page and one.arena is known[2]:
            return  # it has lent more
        _, index, arena = known
        try:
            if index.slot_bytes != self._routes.block_bytes:
                raise ValueError(f"its slots have {index.slot_bytes} bytes instead of {self._routes.block_bytes}")
            self._code = self._code or LoanWrite()  # gets from this home have compiled it
            self._borrowed[home] = Borrowed(Loans(region), page, arena)
        except NotCompiled as error:
            self._usable = False
            log.info("puts to homes on this host take two copies: %s", error)
        except ValueError as error:
            self._ask_after[home] = time.monotonic() + ODD_PAUSE_S
            log.info("puts to %s on this host take two copies: %s", home, error)

    def _forget(self, home: str) -> None:
        """On the event loop. A thread that fills a slot of the lost home keeps its memory mapped until it ends."""
        self._borrowed.pop(home, None)
        self._ask_after.pop(home, None)

    def close(self) -> None:
        """No call may run."""
        for one in self._borrowed.values():
            one.loans.close()
        self._borrowed.clear()

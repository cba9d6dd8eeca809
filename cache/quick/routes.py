"""Routes: which home a thread asks for a block, if it may ask without the event loop.

Everything that this reads belongs to the event loop, which replaces it as a whole: a thread sees the state before or
after a change. What it does not find here goes the usual way, through the event loop (cache/store/store.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import choice
from typing import Any

from cache.block import BlockKey
from cache.index.block_read import BlockRead
from cache.index.shared_index import IndexView
from cache.store.store import Store
from net.loop.tasks import awaited
from net.transfer.common.holds import Hold
from net.transfer.common.memory import Region
from net.transfer.common.path import Path
from net.transfer.engine import TransferEngine
from net.transfer.tcp.blocking_calls import BlockingCalls

log = logging.getLogger(__name__)

NEAR_MIN_BYTES = 64 << 10  # a put of fewer goes through the socket: the copy into shared memory would take longer
OPEN_PAUSE_S = 5.0  # between two attempts to open the path to a home
REPORT_S = 0.02  # hits are reported this long after the first of them


class Routes:
    """Of one client of the pool, which lives on `loop`; create it there."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: Store, transfer: TransferEngine, calls: BlockingCalls
    ) -> None:
        self.calls = calls
        self.block_bytes = store.block_bytes
        self.wait_s = store.deadlines.control_s
        self.marks = store.marks()
        self._loop = loop
        self._store = store
        self._transfer = transfer
        self._open_after: dict[str, float] = {}
        self._hits: deque[tuple[str, BlockKey]] = deque()
        self._report_due = False
        self._borrowing: set[asyncio.Task[Any]] = set()

    @property
    def members(self) -> int:
        """The number of nodes with a share; 0 while the router does not know them yet."""
        return len(self._store.router.members) if self._store.is_routed else 0

    def to_get(self, key: BlockKey) -> tuple[str, bool] | None:
        """(home, whether its memory is mapped here). None: the event loop chooses."""
        router = self._store.router
        homes = router.homes_now(self._loop.time(), key)
        for home in homes:
            if self._store.same_host.known(home) is not None:
                return home, True
        if router.replicas > 1 or not homes:
            return None  # it chooses the replica that should answer first, and another one if that is late
        home = choice(homes)
        return (home, False) if self._by_tcp(home) else None

    def to_put(self, key: BlockKey, nbytes: int) -> tuple[str, bool] | None:
        """(the home that decides alone, whether it copies the bytes from memory of this process). None: the event loop
        asks more than one node, or there is no path yet."""
        router = self._store.router
        if not router.decides_alone((key,)) or not (homes := router.homes(key)) or not self.calls.reaches(homes[0]):
            return None
        path = self._transfer.path_seen(homes[0])
        if path is None:
            self._open_path(homes[0])
            return None
        if nbytes <= NEAR_MIN_BYTES:
            return homes[0], False
        return (homes[0], path.transport == "shm") if path.transport in ("tcp", "shm") else None

    def memory_of(self, home: str) -> tuple[BlockRead, IndexView, Region] | None:
        """See cache.store.same_host.SameHost.known."""
        return self._store.same_host.known(home)

    def is_near(self, home: str) -> bool:
        """Whether the memory of the home can be mapped here."""
        path = self._transfer.path_seen(home)
        return path is not None and path.transport == "shm"

    def hold(self, home: str) -> Hold | None:
        """See net.transfer.engine.TransferEngine.hold."""
        return self._transfer.hold(home)

    def _by_tcp(self, home: str) -> bool:
        path = self._transfer.path_seen(home)
        return path is not None and path.transport == "tcp" and self.calls.reaches(home)

    # --- for the event loop

    def _open_path(self, home: str) -> None:
        """Small puts through the event loop need no path, so nothing else may open one. A home refuses data connections
        of clients without a path."""
        now = time.monotonic()
        if now >= self._open_after.get(home, 0.0):
            self._open_after[home] = now + OPEN_PAUSE_S
            self._on_loop(partial(self._start_opening, home))

    def _start_opening(self, home: str) -> None:
        task = awaited(self._transfer.open(home))
        task.add_done_callback(partial(_opened, home))

    def were_read(self, home: str, keys: Sequence[BlockKey]) -> None:
        """These were read from the memory of the home."""
        self._hits.extend((home, key) for key in keys)
        if not self._report_due:
            self._report_due = True
            self._on_loop(lambda: self._loop.call_later(REPORT_S, self._report))

    def heated(self, hot: Sequence[tuple[BlockKey, int]]) -> None:
        """Homes have said that these keys have that number of replicas."""
        router, now = self._store.router, self._loop.time()
        for key, replicas in hot:
            if len(router.homes_now(now, key)) != replicas:
                self._on_loop(partial(self._heat, key, replicas))

    def _heat(self, key: BlockKey, replicas: int) -> None:
        self._store.router.heated(self._loop.time(), key, replicas)

    def _report(self) -> None:
        self._report_due = False
        by_home: dict[str, list[BlockKey]] = {}
        while self._hits:
            home, key = self._hits.popleft()
            by_home.setdefault(home, []).append(key)
        for home, keys in by_home.items():
            self._store.same_host.were_read(home, keys)

    def announced(self, home: str) -> None:
        """See cache.store.same_host.SameHost.announced."""
        self._on_loop(partial(self._store.same_host.announced, home))

    def on_forget(self, callback: Callable[[str], None]) -> None:
        """See cache.store.same_host.SameHost.on_forget."""
        self._store.same_host.on_forget(callback)

    def borrow(self, home: str, ended: Callable[[tuple[Region, int] | None], None]) -> None:
        """Ask the home for lent slots; `ended` gets the answer, on the event loop."""
        self._on_loop(partial(self._start_borrowing, home, ended))

    def _start_borrowing(self, home: str, ended: Callable[[tuple[Region, int] | None], None]) -> None:
        task = awaited(self._store.same_host.borrow(home))
        self._borrowing.add(task)
        task.add_done_callback(partial(self._borrowed, home, ended))

    def _borrowed(self, home: str, ended: Callable[[Any], None], done: asyncio.Task[tuple[Region, int] | None]) -> None:
        self._borrowing.discard(done)
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.debug("%s lends nothing: %r", home, error)
        ended(None if error is not None else done.result())

    def _on_loop(self, work: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(work)


def _opened(home: str, done: asyncio.Task[Path]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.debug("no path to %s: %r", home, error)

"""Keeper: moves blocks to their homes while the store serves: after joins and losses, after failures, and when hot.

It offers keys to the home that should have them, which requests those it lacks (cache/homes/repair.py). A limit in
bytes per second paces the moves, a few blocks at a time, so that they never fill the rails or pin much of the pool. The
bytes of repairs let all others of this node pass; copies that relieve a home, or that it gives away before it leaves,
have a time in which they are of use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from cache.block import BlockKey
from cache.homes.rendezvous import Members, ranking
from cache.homes.repair import owed
from cache.homes.routing import Router
from cache.protocol import GONE, OTHER, WRITING
from cache.server.server import StoreServer
from cache.sessions.residence import Residence
from cache.store.calls import HOME_ERRORS
from cache.store.job import StoreCall
from cache.store.writer import Writer
from cache.tiers.local_store import LocalStore
from cache.tiers.slots import Pin
from net.loop.tasks import keep
from net.transfer.common.traffic import RailLimit
from net.transfer.engine import BULK, REPAIR

log = logging.getLogger(__name__)

PERIOD_S = 0.25
OFFER_BYTES = 8 << 20  # of one offer
RISING_BYTES = 32 << 20  # of blocks of sessions that are read from SSD at the same time
SCAN_KEYS = 256  # looked at between two turns of the loop
RETRY_S = 2.0  # after a home failed or had no room, or no block for it could be read here
FORGET_S = 600.0  # hints for a member that has been away for longer are dropped


class Keeper:
    """The keeper of the share of node `me`. Use `start`, `leave`, `close` inside the event loop."""

    def __init__(
        self,
        me: str,
        local: LocalStore,
        share: StoreServer,
        writer: Writer,
        router: Router,
        members: Callable[[], Members],
        limit: float = 0.0,
    ) -> None:
        self._me = me
        self._local = local
        self._share = share
        self._writer = writer
        self._router = router
        self._members = members
        self._limit = RailLimit(limit) if limit > 0 else None
        self._before: Members = {}  # the members at the last complete scan
        self._lost: set[str] = set()  # since that scan began; they may be members again
        self._debts: dict[tuple[str, int], OrderedDict[BlockKey, None]] = {}  # (home, priority) -> keys to offer to it
        self._leaving = False
        self._rest_until: dict[str, float] = {}  # homes that failed
        self._away_since: dict[str, float] = {}
        self._rising: deque[BlockKey] = deque()  # blocks of sessions that will soon be read
        self._residence = Residence(0 if local.arena is None else local.arena.num_slots)
        counted = "offered", "moved", "moved_bytes", "expired", "session_dropped", "session_raised"
        self._counts = Counter(dict.fromkeys(counted, 0))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start repairs. Blocks found on SSD are offered to their homes first."""
        if self._task is None:
            self._task = keep(self._run, "repair")

    async def leave(self, timeout_s: float) -> None:
        """Before this node leaves: move blocks to the nodes that become their homes, as far as the time allows. A home
        that does not answer is not asked again: it may be leaving too."""
        await self.close()
        self._leaving = True
        self._share.lending.end()
        after = {name: weight for name, weight in self._members().items() if name != self._me}
        if not after:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._plan(self._members(), after)
                while self._debts:
                    if not await self._pay(least=BULK):
                        await asyncio.sleep(PERIOD_S)
        except TimeoutError:
            log.info("leaving without handing over %d blocks", sum(map(len, self._debts.values())))

    def lost(self, node_id: str) -> None:
        """Another process has, or may get, this name: if it is a member, it lacks what it had before."""
        self._lost.add(node_id)

    async def close(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def stats(self) -> dict[str, int]:
        """Blocks offered, moved and still to be offered; copies from other sites whose time to live was over; blocks of
        sessions that were dropped, and read from SSD ahead of a return."""
        return {**self._counts, "owed": sum(map(len, self._debts.values()))}

    def sessions(self) -> dict[str, int]:
        """Blocks of sessions here: parked now, in DRAM until others need the room, on any tier until it is nearly
        full; so far read from SSD before a return, and dropped."""
        parked, over, aside = len(self._share.parked), self._share.parked.num_over, self._local.num_aside
        raised, dropped = self._counts["session_raised"], self._counts["session_dropped"]
        return {"parked": parked, "aside": aside, "over": over, "raised": raised, "dropped": dropped}

    async def _run(self) -> None:
        while True:
            members = dict(self._members())
            back, self._lost = self._lost & members.keys(), set()
            self._before = {name: share for name, share in self._before.items() if name not in back}
            if members != self._before:
                await self._plan(self._before, members)
                self._before = members
            self._collect(members)
            if over := self._share.copies.expired(asyncio.get_running_loop().time()):
                self._counts["expired"] += await self._local.remove(over)
            await self._move_sessions(asyncio.get_running_loop().time())
            if not await self._pay():
                await asyncio.sleep(PERIOD_S)

    async def _move_sessions(self, now: float) -> None:
        """Move the blocks of sessions whose time has come."""
        parked, local, arena = self._share.parked, self._local, self._local.arena
        due = parked.due(now)
        local.put_aside([(key, now + wanted_s) for key, wanted_s in due.down])
        if local.is_nearly_full and (over := parked.over(SCAN_KEYS)):
            self._counts["session_dropped"] += await local.remove(over)
        self._residence.seen(now, local.num_evictions)
        stay_s = self._residence.seconds()
        coming = [key for key, wait_s in due.up if wait_s <= stay_s]  # others would be evicted unread
        self._rising.extend(local.touch(coming))  # those in DRAM need no room
        while len(self._rising) > local.num_unwanted:  # the room is for what was read, not for what may be read
            self._rising.pop()
        if self._rising and arena is not None:
            first = [self._rising[i] for i in range(min(SCAN_KEYS, len(self._rising)))]
            done, reads = self._local.bring_up(first, max(1, RISING_BYTES // arena.slot_bytes))
            self._counts["session_raised"] += reads
            for _ in range(done):
                self._rising.popleft()

    async def _plan(self, before: Members, after: Members) -> None:
        """Scan all blocks of this node, a part at a time."""
        keys = self._local.keys()
        for first in range(0, len(keys), SCAN_KEYS):
            for key in keys[first : first + SCAN_KEYS]:
                for home in owed(key, self._me, before, after, self._router.replicas):
                    self._owe(home, REPAIR, [key])
            await asyncio.sleep(0)

    def _collect(self, members: Members) -> None:
        """Collect hints whose home is back, and hot blocks."""
        now = asyncio.get_running_loop().time()
        for home in self._share.hints.owners():
            if home not in members:
                if now - self._away_since.setdefault(home, now) > FORGET_S:
                    self._share.hints.forget(home)
                continue
            self._away_since.pop(home, None)
            if (home, REPAIR) not in self._debts and now >= self._rest_until.get(home, 0.0):
                self._owe(home, REPAIR, self._share.hints.due(home, SCAN_KEYS))
        for key in self._share.uneven.take():
            for home in ranking(key, members, self._router.replicas):
                if home != self._me:
                    self._owe(home, REPAIR, [key])
        for key, extra in self._share.hot.take_wanted().items():
            self._spread(now, key, extra, members)
        self._share.hot.cool(now, self._router.replicas, self._local.contains)

    def _spread(self, now: float, key: BlockKey, extra: int, members: Members) -> None:
        """Plan more replicas of a hot block, if this node is its first home."""
        count = min(len(members), self._router.replicas + extra)
        wide = ranking(key, members, count)
        if not wide or wide[0] != self._me or not self._share.hot.spread(now, key, count):
            return
        for home in wide[1:]:
            self._owe(home, BULK, [key])

    def _owe(self, home: str, priority: int, keys: Sequence[BlockKey]) -> None:
        if keys:
            self._debts.setdefault((home, priority), OrderedDict()).update(dict.fromkeys(keys))

    async def _pay(self, least: int = REPAIR) -> bool:
        """Make one offer to every home that lacks blocks, of this priority at least; False when there was nothing to
        offer."""
        loop, paid = asyncio.get_running_loop(), False
        for home, priority in sorted(self._debts, key=lambda debt: -debt[1]):
            if loop.time() < self._rest_until.get(home, 0.0):
                continue
            debt = self._debts[home, priority]
            arena = self._local.arena
            count = max(1, OFFER_BYTES // arena.slot_bytes) if arena is not None else 1
            keys = [debt.popitem(last=False)[0] for _ in range(min(count, len(debt)))]
            if not debt:
                del self._debts[home, priority]
            try:
                paid = True
                again, at_once = await self._offer(home, keys, max(least, priority))
                self._owe(home, priority, again)
                if not at_once:
                    self._rest_until[home] = loop.time() + RETRY_S
            except asyncio.CancelledError:  # `leave` goes on with them
                self._owe(home, priority, keys)
                raise
            except HOME_ERRORS as error:
                log.info("repair of %s: %r", home, error)
                self._rest_until[home] = loop.time() + RETRY_S
                if home in self._members() and not self._leaving:
                    self._owe(home, priority, keys)
                else:
                    self._debts.pop((home, priority), None)
        return paid

    async def _offer(self, home: str, keys: Sequence[BlockKey], priority: int) -> tuple[list[BlockKey], bool]:
        """Returns the keys to offer again, because this node cannot read them now, or because the home has no room for
        them or cannot decide about them now; and whether that may be done at once."""
        arena = self._local.arena
        keys = await self._lacking(home, keys)
        pins = await self._local.pinning.pin_each(keys)  # shorter if there is no slot to read one from SSD into
        held = [(key, pin) for key, pin in zip(keys, pins, strict=False) if pin is not None]
        missing = [key for key, pin in zip(keys, pins, strict=False) if pin is None]
        unread = [key for key in missing if self._local.content(key) is not None] + keys[len(pins) :]
        self._share.hints.settled(set(missing).difference(unread))
        if arena is None or not held:
            return unread, not unread
        try:
            job = StoreCall([key for key, _ in held], arena.region, [], arena.slot_bytes, repair=True)
            job.priority = priority
            job.offsets = [arena.slot_span(pin.slot)[0] for _, pin in held]
            for position, (_, pin) in enumerate(held):
                job.sums[position], job.lengths[position] = pin.checksum, pin.nbytes
            job.facts = [self._local.facts(key) for key, _ in held]
            job.kept = [self._local.is_kept(key) for key, _ in held]
            nbytes = sum(pin.nbytes for _, pin in held)
            if self._limit is not None:
                await asyncio.sleep(self._limit.hold_s(asyncio.get_running_loop().time(), nbytes, urgent=False))
            answers = await self._writer.offer(job, home, len(held))
            self._counts["offered"] += len(held)
            self._counts["moved"] += len(job.stored)
            self._counts["moved_bytes"] += sum(map(job.length, job.stored))
            await self._apply(held, answers)
            later = [key for at, (key, _) in enumerate(held) if answers.get(at, WRITING) == WRITING]
            return unread + later, not later
        finally:
            self._local.pinning.unpin([pin.slot for _, pin in held])

    async def _lacking(self, home: str, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that the home does not have, or has with another content. Blocks that are only on this node's
        SSD are not read for this comparison."""
        contents = {key: content for key in keys if (content := self._local.content(key)) is not None}
        self._share.hints.settled(key for key in keys if key not in contents)
        if not contents:
            return []
        there = await self._writer.has(home, contents)
        self._share.hints.settled(there)
        return [key for key in contents if key not in there]

    async def _apply(self, held: Sequence[tuple[BlockKey, Pin]], answers: dict[int, int]) -> None:
        """Applies the home's answers to this node's copies. A content that lost the agreement is dropped, except at a
        home of the key, which will get the other content; a removed one is dropped everywhere."""
        now, members, replicas = asyncio.get_running_loop().time(), self._members(), self._router.replicas
        for position, answer in answers.items():
            key, pin = held[position]
            if answer == WRITING:
                continue
            self._share.hints.settled([key])
            lost = answer == GONE or (answer == OTHER and self._me not in ranking(key, members, replicas))
            if lost and self._local.content(key) == (pin.checksum, pin.nbytes):
                if answer == GONE:
                    self._share.removed(now, key, (pin.checksum, pin.nbytes))
                await self._local.remove([key])

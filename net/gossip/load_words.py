"""Reads and claims load words of other nodes; sched/gossip/load_word.py defines their layout and meaning.

If the path to a peer is one-sided (RDMA; shared memory for reading), a probe is a READ of its page and a claim is a
FETCH_ADD: neither waits for the peer's Python or event loop. Otherwise, and before a path is open, both are calls on
the control channel. `counters` counts each way.

    load.read{}              ──>  <── {} + page
    load.claim{amount}       ──>  <── {previous}
    load.release{amount}     ──>      (no answer)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from net.bodies import answered, encode, typed
from net.channel.channel import Body, Channel
from net.errors import PeerLost, PeerRefused, RemoteError, TransferError
from net.loop.tasks import keep, spawn
from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable
from net.transfer.engine import URGENT, Op, TransferEngine
from sched.gossip.load_word import (
    BY_MESSAGE_AT,
    CLAIM_MAX,
    CLAIMED_AT,
    COUNTERS,
    PAGE_BYTES,
    RELEASED_AT,
    WORD_BYTES,
    ClaimLedger,
    Load,
    LoadWord,
    TornWord,
)

log = logging.getLogger("mooncake.net")

PAGE = "load"  # names of regions
INBOX = "load-inbox"
READS_MAX = 64  # concurrent one-sided reads
READ_TRIES = 4  # of a word that is being written
PROBE_S = 0.25
CLAIM_TTL_S = 5.0
PUBLISH_PERIOD_S = 0.05  # between two words of a node that called `start`

UNREACHABLE = (PeerLost, PeerRefused, RemoteError, TransferError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Claim:
    """Work announced to a node."""

    peer: str
    amount: int  # in sched.gossip.load_word.CLAIM_UNIT_S
    previous: int  # the claims before this one: `Load.claimed`, unless another acceptor claimed in between
    expires_at: float  # by this node's clock; the owner drops the claim soon after
    one_sided: bool


@dataclass(frozen=True, slots=True)
class Amount:
    """The amount of a claim or of its release."""

    amount: int

    def __post_init__(self) -> None:
        if not 0 < self.amount <= CLAIM_MAX:
            raise ValueError(f"a claim needs an amount between 1 and {CLAIM_MAX}, got {self.amount}")


@dataclass(frozen=True, slots=True)
class Previous:
    """The answer to a claim: the sum of earlier claims."""

    previous: int


class LoadWords:
    """This node's load word, and its access to the words of others. One per node; make it before the node serves."""

    def __init__(
        self,
        channel: Channel,
        transfer: TransferEngine,
        claim_ttl_s: float = CLAIM_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """claim_ttl_s: seconds that a claim counts if its request does not arrive; the same on all nodes."""
        self.counters: Counter[str] = Counter()  # read, claimed; one_sided or message; torn; asked_message: by probes
        self._channel = channel
        self._transfer = transfer
        self._clock = clock
        self._ledger = ClaimLedger(claim_ttl_s)
        self._page = Region.shared(PAGE, 4096)
        self._inbox = Region.private(INBOX, READS_MAX * PAGE_BYTES)
        self._slots = asyncio.Queue[int]()
        for number in range(READS_MAX):
            self._slots.put_nowait(number * PAGE_BYTES)
        self._word = LoadWord()
        self._source: Callable[[], LoadWord] | None = None
        self._publisher: asyncio.Task[None] | None = None
        self._by_message: dict[str, int] = {}  # peer -> claims by message there, as of the last read
        self._opening: dict[str, asyncio.Task[None]] = {}
        transfer.register(self._page)
        transfer.register(self._inbox)
        channel.handle("load.read", self._on_read)
        channel.handle("load.claim", typed(Amount, self._on_claim))
        channel.handle("load.release", typed(Amount, self._on_release))
        self.publish(self._word)

    # --- this node's load

    def publish(self, word: LoadWord) -> None:
        """Publish `word`; this method fills in its version, time and settled claims."""
        if self._page.closed:
            return
        self._look()
        version = self._word.version + 1
        stamped = replace(word, version=version, written_ms=int(time.time() * 1000), settled=self._ledger.settled)
        self._word = stamped
        self._page.memory[:WORD_BYTES] = stamped.pack()

    def start(self, source: Callable[[], LoadWord], period_s: float = PUBLISH_PERIOD_S) -> None:
        """Publish `source()` every `period_s` seconds while other nodes are known, and before each answer to a probe
        that arrives as a call."""
        self._source = source
        self._publisher = keep(partial(self._publish, period_s), "telling the load")

    async def _publish(self, period_s: float) -> None:
        while True:
            if not self._channel.links.alone and self._source is not None:
                self.publish(self._source())
            await asyncio.sleep(period_s)

    def _refresh(self) -> None:
        if self._source is None:
            self.publish(self._word)
            return
        try:
            self.publish(self._source())
        except Exception:
            log.exception("this node cannot report its load")

    @property
    def outstanding(self) -> int:
        """Claims on this node whose requests have not arrived yet, in CLAIM_UNIT_S."""
        self._look()
        return self._ledger.outstanding

    def arrived(self, amount: int) -> None:
        """The request of a claim has arrived. Its work counts in the next word, so the claim ends."""
        self._look()
        self._ledger.end(amount)
        self._refresh()

    def _look(self) -> None:
        if self._page.closed:
            return
        by_card, released_by_card, by_message, released = COUNTERS.unpack_from(self._page.memory, WORD_BYTES)
        self._ledger.seen(self._clock(), by_card + by_message, released_by_card + released)

    def _count(self, claimed: int, released: int) -> None:
        """Add to the counters of messages."""
        _, _, by_message, gone = COUNTERS.unpack_from(self._page.memory, WORD_BYTES)
        new = (by_message + claimed).to_bytes(8, "little") + (gone + released).to_bytes(8, "little")
        self._page.memory[BY_MESSAGE_AT:PAGE_BYTES] = new
        self._look()

    def _claimed(self) -> int:
        by_card, _, by_message, _ = COUNTERS.unpack_from(self._page.memory, WORD_BYTES)
        return int(by_card + by_message)

    # --- other nodes' load

    async def probe(self, peers: Iterable[str], timeout_s: float = PROBE_S) -> dict[str, Load]:
        """The load of each peer that answers in time; all are asked concurrently."""
        names = list(dict.fromkeys(peers))
        found = await asyncio.gather(*(self._read(peer, timeout_s) for peer in names), return_exceptions=True)
        loads: dict[str, Load] = {}
        for peer, load in zip(names, found, strict=True):
            if isinstance(load, Load):
                loads[peer] = load
                self._by_message[peer] = load.claimed_by_message
            elif not isinstance(load, UNREACHABLE):
                raise load
        return loads

    async def reserve(self, peer: str, amount: int, timeout_s: float = PROBE_S) -> Claim:
        """Announce work of `amount` > 0. `previous` minus the probe's `claimed` was claimed in between.
        Raises PeerLost, PeerRefused, RemoteError, TransferError, TimeoutError; the claim may then exist until it
        expires."""
        if not 0 < amount <= CLAIM_MAX:
            raise ValueError(f"a claim must be between 1 and {CLAIM_MAX}, got {amount}")
        expires_at = self._clock() + self._ledger.ttl_s
        if peer == self._channel.node_id:
            previous = self._claimed()
            self._count(amount, 0)
            return Claim(peer, amount, previous, expires_at, one_sided=False)
        try:
            by_card = await self._transfer.fetch_add(peer, PAGE, CLAIMED_AT, amount, timeout_s)
        except Unusable:
            answer, _ = await self._channel.call(peer, "load.claim", encode(Amount(amount)), timeout_s=timeout_s)
            self.counters["claimed_message"] += 1
            return Claim(peer, amount, answered(Previous, answer).previous, expires_at, one_sided=False)
        self.counters["claimed_one_sided"] += 1
        return Claim(peer, amount, by_card + self._by_message.get(peer, 0), expires_at, one_sided=True)

    async def release(self, claim: Claim) -> None:
        """The announced work will not arrive. Raises nothing, because the claim also expires without this call."""
        if self._clock() >= claim.expires_at:
            return  # it would end another acceptor's claim
        if claim.peer == self._channel.node_id:
            self._count(0, claim.amount)
            return
        with suppress(*UNREACHABLE, Unusable):
            if claim.one_sided:
                await self._transfer.fetch_add(claim.peer, PAGE, RELEASED_AT, claim.amount, PROBE_S)
            else:
                self._channel.post(claim.peer, "load.release", encode(Amount(claim.amount)))

    async def _read(self, peer: str, timeout_s: float) -> Load:
        if peer == self._channel.node_id:
            self._refresh()
            return Load.unpack(bytes(self._page.memory[:PAGE_BYTES]))
        if self._transfer.is_one_sided(peer):
            with suppress(TornWord):
                return await self._read_one_sided(peer, timeout_s)
        else:
            self.open_soon(peer)
        _, page = await self._channel.call(peer, "load.read", {}, timeout_s=timeout_s)
        self.counters["read_message"] += 1
        return Load.unpack(bytes(page))

    async def _read_one_sided(self, peer: str, timeout_s: float) -> Load:
        slot = await self._slots.get()
        try:
            for _ in range(READ_TRIES):
                span = (slot, 0, PAGE_BYTES)
                await self._transfer.submit(peer, Op.READ, INBOX, PAGE, [span], timeout_s, URGENT)
                with suppress(TornWord):
                    load = Load.unpack(bytes(self._inbox.memory[slot : slot + PAGE_BYTES]))
                    self.counters["read_one_sided"] += 1
                    return load
                self.counters["torn"] += 1
        finally:
            self._slots.put_nowait(slot)
        raise TornWord(f"{READ_TRIES} reads of the load word of {peer!r} met a write in progress")

    def open_soon(self, peer: str) -> None:
        """Open the path to this peer, so that its next probe can be one-sided."""
        if self._transfer.may_be_one_sided(peer) and peer not in self._opening:
            task = spawn(self._open(peer), "opening the path to a load word")
            self._opening[peer] = task
            task.add_done_callback(lambda _: self._opening.pop(peer, None))

    async def _open(self, peer: str) -> None:
        try:
            path = await self._transfer.open(peer)
            log.debug("load words of %s: %s", peer, path.transport)
        except UNREACHABLE as error:
            log.debug("load words of %s by messages: %s", peer, error)

    # --- calls from other nodes

    def _check_open(self) -> None:
        if self._page.closed:
            raise RemoteError("this node is closing", "closed")

    async def _on_read(self, peer: str, body: Body, data: memoryview) -> tuple[Body, list[bytes]]:
        self._check_open()
        self._refresh()
        return {}, [bytes(self._page.memory[:PAGE_BYTES])]

    async def _on_claim(self, peer: str, body: Amount, data: memoryview) -> Previous:
        self._check_open()
        previous = self._claimed()
        self._count(body.amount, 0)
        return Previous(previous)

    async def _on_release(self, peer: str, body: Amount, data: memoryview) -> None:
        self._check_open()
        self._count(0, body.amount)

    async def close(self) -> None:
        """Call it before the transfer engine's `close`. Idempotent."""
        tasks = list(self._opening.values())
        if self._publisher is not None:
            tasks.append(self._publisher)
            self._publisher = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for region in (self._page, self._inbox):
            if not region.closed:
                self._transfer.unregister(region.name)
                region.close()

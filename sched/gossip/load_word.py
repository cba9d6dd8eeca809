"""The load word: the 64 bytes in which a node publishes its load, and the counters of claims next to it. Pure.

A node keeps one page in memory that peers may read, by RDMA without its Python taking part:

      0  load word     written by the owner; a reader detects a read during a write by the checksum
     64  claimed       8 bytes each, little-endian; only the cards of peers change these two (FETCH_ADD):
     72  released      a card's atomics and the CPU's stores are not atomic to each other
     80  claimed       the same two for claims that arrived as messages; only the owner writes them
     88  released

A *claim* announces work before its request arrives, so that acceptors that decide at the same moment see each other:
FETCH_ADD returns the sum of the earlier claims, which orders them exactly. All four counters only grow. A claim that is
neither released, nor arrived, nor older than its time to live is *outstanding*; the owner adds up the other claims in
the word's field `settled`.

(Reference: the record of the scheduler's design. A checksum replaces its seqlock, because it also detects a torn read.)
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sched.classes import CLASSES
from sched.gossip.record import LOAD_WORD, NodeRecord, structure

WORD = structure(LOAD_WORD)
"""LoadWord's fields in order without the checksum, which follows as 4 bytes: zlib.crc32 of these 60."""

WORD_BYTES = 64
COUNTERS = struct.Struct("<4Q")
PAGE_BYTES = WORD_BYTES + COUNTERS.size
CLAIMED_AT, RELEASED_AT = 64, 72  # for FETCH_ADD
BY_MESSAGE_AT = 80

CLAIM_UNIT_S = 1e-6
"""Claims are counted in microseconds of predicted prefill on the claimed node."""

CLAIM_MAX = 1 << 32
"""Maximum of one claim, about 72 minutes: the 64-bit counters never overflow."""

LOAD = (
    *("work_s", "queued_tokens", "decode_step_s", "blocks_used", "blocks_total", "running", "max_running"),
    *("dram_fill", "ssd_fill"),
)

ROLE_BITS = {"prefill": 1, "decode": 2, "store": 4}
DRAINING = 8  # finishes its requests, takes no new ones
CHANGING = 16  # takes no prefill and no decode until it has changed its role
STAGES = 32  # can compute some of the layers of a long prompt (--prefill-parallel cpp)
READING = 64  # reads the weights that the cluster serves, and takes no new requests until it has them
CLOSED = DRAINING | READING  # takes no new requests
LACK_SHIFT = 12
"""The four bits of the flags from here on: sixteenths of a node's ranks with experts that are masked."""
LACK_MAX = 15


def lack_bits(share: float) -> int:
    """In the flags of a record: `share` of the ranks is masked, rounded up; 1 = no other rank has their experts."""
    return min(LACK_MAX, math.ceil((LACK_MAX + 1) * share)) << LACK_SHIFT


def lack_of(flags: int) -> float:
    """The share of a node's ranks that its flags tell."""
    return (flags >> LACK_SHIFT) / (LACK_MAX + 1)


class TornWord(ValueError):
    """The checksum does not match: the owner was writing. Read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWord:
    """Load of one node as of `written_ms`. The owner fills in the load; the writer (net/gossip/load_words.py) stamps
    version, written_ms and settled."""

    version: int = 0  # of this incarnation's words; 0 = no word was written yet
    node: int = 0  # the low 32 bits of sched.gossip.state.node_key
    incarnation: int = 0
    written_ms: int = 0  # the owner's unix clock, modulo 2**32
    work_s: float = 0.0  # time until its accepted prefill work is done
    queued_tokens: int = 0  # prefill tokens of that work
    settled: int = 0  # sum of the claims that are no longer outstanding
    decode_step_s: float = 0.0  # predicted decode step with one more request
    blocks_used: int = 0  # KV blocks held by requests
    blocks_total: int = 0
    running: int = 0
    max_running: int = 0
    waiting_interactive: int = 0  # requests by class (sched/classes.py)
    waiting_standard: int = 0
    waiting_batch: int = 0
    flags: int = 0  # ROLE_BITS, DRAINING, CHANGING, STAGES, READING, lack_bits
    dram_fill: float = 0.0  # share of its DRAM tier in use, in 1/255
    ssd_fill: float = 0.0
    digest_epoch: int = 0  # a new epoch shows that its cached keys changed a lot

    @classmethod
    def of(cls, record: NodeRecord, waiting: dict[str, int], flags: int = 0, digest_epoch: int = 0) -> Self:
        """The part of a record that changes from step to step. waiting: requests by class."""
        by_class = {f"waiting_{name}": waiting.get(name, 0) for name in CLASSES}
        return cls(
            node=record.node & 0xFFFFFFFF,
            incarnation=record.incarnation,
            flags=flags,
            digest_epoch=digest_epoch,
            **by_class,
            **_load_of(record),
        )

    @property
    def waiting(self) -> int:
        return self.waiting_interactive + self.waiting_standard + self.waiting_batch

    def age_s(self, their_unix_s: float) -> float:
        """Seconds since it was written, by the owner's clock; 0 if that time is in the future."""
        passed = (int(their_unix_s * 1000) - self.written_ms) % 2**32
        return passed / 1000 if passed < 2**31 else 0.0

    def onto(self, record: NodeRecord) -> NodeRecord:
        """The node's gossiped record with the load of this word, which is newer; its fitted models stay."""
        return replace(record, waiting=self.waiting, age_s=0.0, **_load_of(self))

    def pack(self) -> bytes:
        """64 bytes; counts saturate."""
        body = WORD.pack(
            *(self.version % 2**32, self.node, self.incarnation % 2**32, self.written_ms % 2**32),
            *(self.work_s, min(self.queued_tokens, 0xFFFFFFFF), self.settled % 2**64, self.decode_step_s),
            *(min(count, 0xFFFFFFFF) for count in (self.blocks_used, self.blocks_total)),
            *(min(count, 0xFFFF) for count in (self.running, self.max_running)),
            *(min(c, 0xFFFF) for c in (self.waiting_interactive, self.waiting_standard, self.waiting_batch)),
            self.flags,
            *(round(255 * min(1.0, share)) for share in (self.dram_fill, self.ssd_fill)),
            self.digest_epoch % 2**16,
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises TornWord, and ValueError for another length or a time that is negative or not finite."""
        if len(data) != WORD_BYTES:
            raise ValueError(f"a load word has {WORD_BYTES} bytes, got {len(data)}")
        if zlib.crc32(data[: WORD.size]) != int.from_bytes(data[WORD.size :], "little"):
            raise TornWord("a load word with a wrong checksum")
        values = dict(zip((field.name for field in fields(cls)), WORD.unpack(data[: WORD.size]), strict=True))
        if not all(math.isfinite(values[name]) and values[name] >= 0 for name in ("work_s", "decode_step_s")):
            raise ValueError("a load word with a time that is negative or not finite")
        values["dram_fill"] /= 255
        values["ssd_fill"] /= 255
        return cls(**values)


def _load_of(source: LoadWord | NodeRecord) -> dict[str, Any]:
    """The fields that mean the same in a word and in a record."""
    return {name: getattr(source, name) for name in LOAD}


@dataclass(frozen=True, slots=True)
class Load:
    """The content of one read of a node's page."""

    word: LoadWord
    claimed: int  # sum of all claims ever made, by cards and by messages
    claimed_by_message: int  # the part of the claims by messages

    @classmethod
    def unpack(cls, page: bytes) -> Self:
        """Parses the first PAGE_BYTES of a page. Raises the errors of LoadWord.unpack."""
        by_card, _, by_message, _ = COUNTERS.unpack_from(page, WORD_BYTES)
        return cls(LoadWord.unpack(page[:WORD_BYTES]), by_card + by_message, by_message)

    @property
    def outstanding(self) -> int:
        """Claims whose requests have not arrived yet, in CLAIM_UNIT_S."""
        return max(0, self.claimed - self.word.settled)

    @property
    def wait_s(self) -> float:
        """Seconds of work ahead of a request that is sent there now."""
        return self.word.work_s + self.outstanding * CLAIM_UNIT_S


class ClaimLedger:
    """The owner's account of claims. Counters do not say whose claims they are, so a release, an arrival or an expiry
    always ends the oldest claim: the sum is right, and no claim counts for longer than `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.settled = 0  # written to the word
        self._claimed = self._released = 0
        self._open: deque[tuple[float, int]] = deque()  # (time of its expiry, amount)

    @property
    def outstanding(self) -> int:
        return self._claimed - self.settled

    def seen(self, now: float, claimed: int, released: int) -> None:
        """Record the present values of the counters."""
        if claimed > self._claimed:
            self._open.append((now + self.ttl_s, claimed - self._claimed))
            self._claimed = claimed
        if released > self._released:
            self.end(released - self._released)
            self._released = released
        while self._open and self._open[0][0] <= now:
            self.settled += self._open.popleft()[1]

    def end(self, amount: int) -> None:
        """End claims of `amount` that were released or whose requests have arrived. An excess over the outstanding
        claims had expired before."""
        while amount > 0 and self._open:
            until, oldest = self._open.popleft()
            taken = min(amount, oldest)
            amount -= taken
            self.settled += taken
            if taken < oldest:
                self._open.appendleft((until, oldest - taken))

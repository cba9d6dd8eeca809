"""The load word: the 64 bytes in which a node publishes its load, and the counters of claims next to it. Pure.

A node keeps one page in memory that peers may read, by RDMA without its Python taking part:

      0  load word     written by the owner; a reader that met the writer midway sees a checksum that does not fit
     64  claimed       8 bytes each, little-endian; these two are only ever changed by the cards of peers (FETCH_ADD):
     72  released      an atomic of a card and a store of the CPU do not know of each other
     80  claimed       the same two for claims that came as messages; only the owner writes them
     88  released

A *claim* says "work of this much is on its way to you" before the request itself is, so that acceptors which decide at
the same moment see each other: FETCH_ADD returns what had been claimed before, and so puts them in an exact order. All
four counters only grow. What was claimed and is neither released, nor arrived, nor older than its time to live is
*outstanding*; the owner takes the sum of the others off in the word's field `settled`.

(Reference: the record of the scheduler's design; the seqlock there is a checksum here, which also sees a torn read.)
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Self

from sched.classes import CLASSES
from sched.gossip.state import NodeRecord

WORD = struct.Struct("<4IfIQf2I5HH2BH")
"""LoadWord's fields in order without the checksum, which follows as 4 bytes: zlib.crc32 of these 60."""

WORD_BYTES = 64
COUNTERS = struct.Struct("<4Q")
PAGE_BYTES = WORD_BYTES + COUNTERS.size
CLAIMED_AT, RELEASED_AT = 64, 72  # for FETCH_ADD
BY_MESSAGE_AT = 80

CLAIM_UNIT_S = 1e-6
"""Claims are counted in microseconds of predicted prefill at the node that is claimed."""

CLAIM_MAX = 1 << 32
"""Of one claim, an hour and a bit: so small that the counters of 64 bits never overflow."""

ROLE_BITS = {"prefill": 1, "decode": 2, "store": 4}
DRAINING = 8  # finishes what it has, takes nothing new
CHANGING = 16  # neither prefills nor decodes for others until it has changed its role


class TornWord(ValueError):
    """The checksum does not fit: the owner was writing. Read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWord:
    """Load of one node as of `written_ms`. The owner fills in the load; version, written_ms and settled are stamped
    where it is written (net/gossip/load_words.py)."""

    version: int = 0  # of this incarnation's words; 0 = nothing was written yet
    node: int = 0  # the low 32 bits of sched.gossip.state.node_key
    incarnation: int = 0
    written_ms: int = 0  # the owner's unix clock, modulo 2**32
    work_s: float = 0.0  # time until the prefill work it has accepted is done
    queued_tokens: int = 0  # of that work
    settled: int = 0  # claims that are over
    decode_step_s: float = 0.0  # predicted decode step if one more request joined it
    blocks_used: int = 0  # KV blocks held by requests
    blocks_total: int = 0
    running: int = 0
    max_running: int = 0
    waiting_interactive: int = 0  # requests by class (sched/classes.py)
    waiting_standard: int = 0
    waiting_batch: int = 0
    flags: int = 0  # ROLE_BITS, DRAINING
    dram_fill: float = 0.0  # share of its DRAM tier in use, in 1/255
    ssd_fill: float = 0.0
    digest_epoch: int = 0  # another one than before: what it holds has changed much

    @classmethod
    def of(cls, record: NodeRecord, waiting: dict[str, int], flags: int = 0, digest_epoch: int = 0) -> Self:
        """The part of a record that changes from step to step. waiting: requests by class."""
        by_class = {f"waiting_{name}": waiting.get(name, 0) for name in CLASSES}
        return cls(
            node=record.node & 0xFFFFFFFF,
            incarnation=record.incarnation,
            work_s=record.work_s,
            queued_tokens=record.queued_tokens,
            decode_step_s=record.decode_step_s,
            blocks_used=record.blocks_used,
            blocks_total=record.blocks_total,
            running=record.running,
            max_running=record.max_running,
            flags=flags,
            dram_fill=record.dram_fill,
            ssd_fill=record.ssd_fill,
            digest_epoch=digest_epoch,
            **by_class,
        )

    @property
    def waiting(self) -> int:
        return self.waiting_interactive + self.waiting_standard + self.waiting_batch

    def age_s(self, their_unix_s: float) -> float:
        """Seconds since it was written, by the owner's clock; 0 when that says it is not written yet."""
        passed = (int(their_unix_s * 1000) - self.written_ms) % 2**32
        return passed / 1000 if passed < 2**31 else 0.0

    def onto(self, record: NodeRecord) -> NodeRecord:
        """The node's gossiped record with the load of this word, which is newer; its fitted models stay."""
        return replace(
            record,
            running=self.running,
            waiting=self.waiting,
            max_running=self.max_running,
            queued_tokens=self.queued_tokens,
            blocks_used=self.blocks_used,
            blocks_total=self.blocks_total,
            age_s=0.0,
            work_s=self.work_s,
            decode_step_s=self.decode_step_s,
            dram_fill=self.dram_fill,
            ssd_fill=self.ssd_fill,
        )

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


@dataclass(frozen=True, slots=True)
class Load:
    """What one read of a node's page says."""

    word: LoadWord
    claimed: int  # sum of all claims ever made, by cards and by messages
    claimed_by_message: int  # the part of the latter

    @classmethod
    def unpack(cls, page: bytes) -> Self:
        """The first PAGE_BYTES of a page. Raises what LoadWord.unpack raises."""
        by_card, _, by_message, _ = COUNTERS.unpack_from(page, WORD_BYTES)
        return cls(LoadWord.unpack(page[:WORD_BYTES]), by_card + by_message, by_message)

    @property
    def outstanding(self) -> int:
        """Claims whose requests have not come yet, in CLAIM_UNIT_S."""
        return max(0, self.claimed - self.word.settled)

    @property
    def wait_s(self) -> float:
        """Seconds of work before a request that is sent there now."""
        return self.word.work_s + self.outstanding * CLAIM_UNIT_S


class ClaimLedger:
    """The owner's account of claims. Counters say how much, not whose, so what ends a claim (release, arrival, age)
    always ends the oldest: the sum is right, and no claim is counted for longer than `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.settled = 0  # goes into the word
        self._claimed = self._released = 0
        self._open: deque[tuple[float, int]] = deque()  # (end of its life, amount)

    @property
    def outstanding(self) -> int:
        return self._claimed - self.settled

    def seen(self, now: float, claimed: int, released: int) -> None:
        """The counters stand there now."""
        if claimed > self._claimed:
            self._open.append((now + self.ttl_s, claimed - self._claimed))
            self._claimed = claimed
        if released > self._released:
            self.end(released - self._released)
            self._released = released
        while self._open and self._open[0][0] <= now:
            self.settled += self._open.popleft()[1]

    def end(self, amount: int) -> None:
        """Claims of so much have been released, or their requests are here. What is more than outstanding had expired
        before."""
        while amount > 0 and self._open:
            until, oldest = self._open.popleft()
            taken = min(amount, oldest)
            amount -= taken
            self.settled += taken
            if taken < oldest:
                self._open.appendleft((until, oldest - taken))

"""The messages of nodes about pooled blocks: their kinds and their bodies. Pure.

Block keys are the data of a message, 16 bytes each (cache/protocol.py). A list with one entry per block is flat:
reading it costs no Python code per block (net/bodies.py). An empty list of lengths means that every block fills its
slot. Bodies of gets and puts are not frozen: a frozen one takes three times as long to make, which is half the time of
a short message. The bulk calls for blocks are in cache/bulk_messages.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.answer_checks import all_about, count_found, one_each
from cache.offer import PLAIN_OFFER, Contents, Offer, at_least
from cache.sessions.parked import Times
from cache.ssd_reads import FREE, SsdPrice
from net.errors import RemoteError

# asker -> home
HAS = "store.has"  # which of these keys are here, and which of those must be read from SSD?
PIN = "store.pin"  # lease the blocks that are here, to read them
RESERVE = "store.reserve"  # lease slots for these, to write them; COMMIT ends the lease
COMMIT = "store.commit"
UNPIN = "store.unpin"  # end a lease of either kind, even before its grant has arrived
READ = "store.read"  # send small blocks, in one message
WRITE = "store.write"  # store small blocks, in one message
TAKE = "store.take"  # store these: copy them from the memory of the asker, which is on the home's host
LEND = "store.lend"  # lend slots to the asker, which is on the home's host (cache/index/loans.py)
FILLED = "store.filled"  # blocks were announced in lent slots while the home was asleep
BAD = "store.bad"  # these blocks arrived damaged by READ
USED = "store.used"  # a process of this host read these without a message (cache/store/same_host.py)
REMOVE = "store.remove"  # readers no longer find these here
PARK = "store.park"  # a turn of the session that has these is over (cache/sessions/)
UNEVEN = "store.uneven"  # other homes may lack these: offer them the home's copies
DURABLE = "store.durable"  # write these to SSD and sync them; answer when that is done
KEEP = "store.keep"  # never evict these from now on, or allow it again
FLUSH = "store.flush"  # answer when all blocks committed so far are synced on SSD
LIST = "store.list"  # which keys that begin with these bytes are here?
OUTSETS = "store.outsets"  # the first bytes of these blocks
STATS = "store.stats"
# client -> any node
MEMBERS = "store.members"  # where are the shares of the pool?


# --- looking


@dataclass(slots=True)
class Has:
    """HAS. With `contents`, one per key, a block of another content is absent."""

    leading: bool = False  # blocks after the first missing one do not matter
    contents: Contents | None = None


@dataclass(slots=True)
class Look:
    """The answer to HAS."""

    have: Sequence[int]  # per key 0, ABSENT or ELSEWHERE; with `leading` it may end at the first nonzero one
    on_ssd: Sequence[int] = ()  # positions of those that must be read from SSD
    price: SsdPrice = FREE  # the present price of that

    def check(self, asked: int, leading: bool) -> Look:
        """This. Raises RemoteError when it is none about `asked` keys."""
        if len(self.have) > asked or (len(self.have) < asked and not leading):
            raise RemoteError(f"{len(self.have)} answers about {asked} keys", "bad_answer")
        all_about(self.on_ssd, asked)
        return self


# --- leases


@dataclass(frozen=True, slots=True)
class Place:
    """The location of the slots of a lease; without a region nothing is leased."""

    region: str
    slot_bytes: int
    epoch: str = ""  # of a lease for writing: see PathFinder.epoch_of


NO_PLACE = Place("", 0)


@dataclass(slots=True)
class Pin:
    """PIN."""

    lease: int
    leading: bool = False


@dataclass(slots=True)
class Pinned:
    """The answer to PIN. The lists without a comment have one entry for each present block, in order."""

    place: Place
    slots: Sequence[int]  # per key a slot, ABSENT or ELSEWHERE; with `leading` it may end before the first non-slot
    checksums: Sequence[int]
    tiers: Sequence[str]
    lengths: Sequence[int] = ()
    more: bool = False  # `slots` ends early only because room is short: ask again from there
    hot: Sequence[tuple[int, int]] = ()  # (position, replicas) of blocks that other nodes have too

    def check(self, asked: int) -> Pinned:
        """This. Raises RemoteError when it is none about `asked` keys."""
        found = count_found(self.slots, asked)
        one_each(found, self.checksums, self.tiers, self.lengths or self.checksums)
        all_about([position for position, _ in self.hot], asked)
        return self


@dataclass(slots=True)
class Reserve:
    """RESERVE."""

    lease: int
    offer: Offer = PLAIN_OFFER


@dataclass(slots=True)
class Reserved:
    """The answer to RESERVE."""

    place: Place
    slots: Sequence[int]  # of a leading part of the keys; or in place of a slot an answer of cache/protocol.py
    trouble: str = ""  # of the disk, where room has ended because of that

    def check(self, asked: int) -> Reserved:
        """This. Raises RemoteError when it is none about `asked` keys."""
        count_found(self.slots, asked)
        return self


@dataclass(slots=True)
class Commit:
    """COMMIT. The lists have one entry per slot of the lease, in its order."""

    lease: int
    checksums: Sequence[int]
    lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")
        at_least(1, self.lengths, "a length")


@dataclass(slots=True)
class Committed:
    """The answer to COMMIT."""

    answers: Sequence[int]  # per slot of the lease: STORED, or the reason if the key has got another value meanwhile

    def check(self, asked: int) -> Committed:
        """This. Raises RemoteError when it is none about `asked` blocks."""
        one_each(asked, self.answers)
        return self


@dataclass(slots=True)
class Unpin:
    """UNPIN."""

    lease: int
    bad: Sequence[int] = ()  # positions in the lease whose bytes did not match


# --- blocks in messages


@dataclass(slots=True)
class Read:
    """READ."""

    leading: bool = False


@dataclass(slots=True)
class BlocksRead:
    """The answer to READ; the blocks are its data. Like Pinned, but `slots` has 0 for each present block."""

    slots: Sequence[int]
    checksums: Sequence[int]
    lengths: Sequence[int]
    tiers: Sequence[str]
    more: bool = False
    hot: Sequence[tuple[int, int]] = ()

    def check(self, asked: int, nbytes: int) -> BlocksRead:
        """Returns self. Raises RemoteError unless it answers for `asked` keys, with `nbytes` of blocks."""
        one_each(count_found(self.slots, asked), self.checksums, self.lengths, self.tiers)
        if sum(self.lengths) != nbytes or min(self.lengths, default=1) < 1:
            raise RemoteError(f"{nbytes} bytes are not {len(self.lengths)} blocks of these lengths", "bad_answer")
        all_about([position for position, _ in self.hot], asked)
        return self


@dataclass(slots=True)
class Write:
    """WRITE; the blocks follow the keys."""

    lengths: Sequence[int]
    checksums: Sequence[int]
    offer: Offer = PLAIN_OFFER

    def __post_init__(self) -> None:
        at_least(0, self.checksums, "a checksum")
        at_least(1, self.lengths, "a length")
        if len(self.lengths) != len(self.checksums):
            raise ValueError(f"{len(self.lengths)} lengths and {len(self.checksums)} checksums")


@dataclass(slots=True)
class Taken:
    """The answer to WRITE and PUT."""

    slots: Sequence[int]  # STORED, or another answer of cache/protocol.py, for a leading part of the keys
    trouble: str = ""  # of the disk, where room has ended because of that

    def check(self, asked: int) -> Taken:
        """This. Raises RemoteError when it is none about `asked` keys."""
        count_found(self.slots, asked)
        return self


# --- blocks in the memory of the asker (cache/server/taking.py)


@dataclass(slots=True)
class Take:
    """TAKE."""

    keys: bytes  # 16 for each block
    slot_bytes: int  # length of each block, if there are no lengths
    region: str
    offsets: Sequence[int]  # bytes
    mark: tuple[int, int]  # cache.stable_marks.Mark
    lengths: Sequence[int] = ()
    checks: bool = True  # False: the blocks get no checksums
    offer: Offer = PLAIN_OFFER

    def __post_init__(self) -> None:
        at_least(0, self.offsets, "an offset")
        at_least(1, self.lengths, "a length")


@dataclass(slots=True)
class TakenThere:
    """The answer to TAKE."""

    slots: Sequence[int]  # see Taken
    checksums: Sequence[int]  # of those that were stored
    trouble: str = ""
    mapped: bool = True  # False: the home cannot access that memory, or not yet

    def check(self, asked: int) -> TakenThere:
        """This. Raises RemoteError when it is none about `asked` keys."""
        one_each(count_found(self.slots, asked), self.checksums)
        return self


@dataclass(slots=True)
class Lent:
    """The answer to LEND."""

    page: int  # of LOANS_REGION; -1: the home lends nothing


# --- lasting (cache/server/lasting.py), and the rest


@dataclass(frozen=True, slots=True)
class MakeDurable:
    """DURABLE."""

    wait_s: float  # the deadline of the asking node


@dataclass(frozen=True, slots=True)
class MadeDurable:
    """The answer to DURABLE."""

    durable: Sequence[bool]  # one per key
    why: str = ""  # the reason if not all are durable

    def check(self, asked: int) -> MadeDurable:
        """This. Raises RemoteError when it is none about `asked` keys."""
        one_each(asked, self.durable)
        return self


@dataclass(frozen=True, slots=True)
class Keep:
    """KEEP."""

    keep: bool  # True: never evict them; False: allow it again


@dataclass(frozen=True, slots=True)
class KeptThere:
    """The answer to KEEP."""

    answers: Sequence[int] = ()  # to a request with keep=True: KEPT, PINS_FULL or ABSENT for each
    given_up: int = 0  # how many were protected before

    def check(self, asked: int) -> KeptThere:
        """Returns self. Raises RemoteError unless it answers for `asked` keys to keep."""
        one_each(asked, self.answers)
        return self


NEVER_MS = -1


@dataclass(frozen=True, slots=True)
class Park:
    """PARK. When the blocks move down, up, down again and are dropped (cache/sessions/parked.py), milliseconds from
    now; NEVER_MS: never."""

    session: int  # from 0 on
    down_ms: int
    up_ms: int
    late_ms: int
    over_ms: int

    @classmethod
    def at(cls, session: int, times: Times) -> Park:
        seconds = times.down_s, times.up_s, times.late_s, times.over_s
        return cls(session, *(NEVER_MS if one == math.inf else math.ceil(1000 * one) for one in seconds))

    def __post_init__(self) -> None:
        """Raises ValueError."""
        at_least(0, [self.session], "a session")
        at_least(NEVER_MS, [self.down_ms, self.up_ms, self.late_ms, self.over_ms], "a time, ms,")

    def times(self) -> Times:
        given = self.down_ms, self.up_ms, self.late_ms, self.over_ms
        return Times(*(math.inf if one == NEVER_MS else one / 1000 for one in given))


@dataclass(frozen=True, slots=True)
class Removed:
    """The answer to REMOVE."""

    removed: int


LISTED_MAX = 1 << 16
"""Keys in one answer to LIST."""

OUTSETS_MAX = 256
"""Keys in one question OUTSETS."""


@dataclass(frozen=True, slots=True)
class ListKeys:
    """LIST. The answer's data are keys in ascending order."""

    prefix: bytes
    after: bytes = b""  # only keys above this one


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer to LIST."""

    more: bool = False  # ask again after the last key


@dataclass(frozen=True, slots=True)
class ReadOutsets:
    """OUTSETS."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Outsets:
    """The answer to OUTSETS; the bytes are its data."""

    lengths: Sequence[int]  # per key; 0: it is not here

    def check(self, asked: int, nbytes: int) -> Outsets:
        """This. Raises RemoteError when it is none about `asked` keys with `nbytes` of data."""
        one_each(asked, self.lengths)
        if sum(self.lengths) != nbytes or min(self.lengths, default=0) < 0:
            raise RemoteError(f"{nbytes} bytes do not have these lengths", "bad_answer")
        return self


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The answer to STATS."""

    stats: dict[str, Any] = field(default_factory=dict)  # as returned by cache.store.store.Store


@dataclass(frozen=True, slots=True)
class PoolMembers:
    """The answer to MEMBERS."""

    members: Sequence[tuple[str, str, int, int]]  # node id, host, port, bytes of its share
    block_bytes: int
    replicas: int

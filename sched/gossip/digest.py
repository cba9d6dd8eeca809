"""The set of keys that a node holds, in 12 bits per key: a cuckoo filter, sent as full pages or changed slots. Pure.

Fan, Andersen, Kaminsky and Mitzenmacher, "Cuckoo Filter: Practically Better Than Bloom" (2014): a key has a 12-bit
fingerprint and two buckets of four slots; either bucket follows from the other and the fingerprint. A key that was
added is always found; one that was not is found with probability <= 8 / 4095 per lookup.

Only the owner inserts keys. Readers copy slots, so a delta gives exactly the same table as a full copy, and costs a
reader one indexed assignment. (epoch, seq) identifies a state: a delta leads from one seq to another within an epoch. A
table that has grown or belongs to another process has a new epoch and is sent in full. Epochs are serial numbers
(sched/membership/serial.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sched.membership.serial import following

LANES = 4
"""Slots of a bucket."""

FINGERPRINT_BITS = 12
FINGERPRINTS = 1 << FINGERPRINT_BITS

MAX_BUCKETS = 1 << 18
"""A changed slot is sent in 32 bits: 20 for its number, 12 for the fingerprint. This allows a million keys."""

MAX_KICKS = 400
LOAD_LIMIT = 0.95
"""A table grows when this share of its slots is in use; slightly above it, insertions begin to fail."""

Slots = npt.NDArray[np.uint16]
"""[buckets * LANES] fingerprints, 0 = empty."""

_delta_head = struct.Struct("<IIII")
_page_head = struct.Struct("<IIIII")
PAGE_SLOTS = 896
"""Slots in one page of a full copy: 1,344 bytes of fingerprints."""


class DigestError(Exception):
    """The bytes are not a valid delta or page."""


def alternate(fingerprint: int, buckets: int) -> int:
    """A bucket number XOR this value is the fingerprint's other bucket."""
    return (fingerprint * 0x5BD1E995 >> 7) & (buckets - 1)


def alternates(fingerprints: Slots, buckets: int) -> npt.NDArray[np.int64]:
    """`alternate` of each of them."""
    return (fingerprints.astype(np.int64) * 0x5BD1E995 >> 7) & (buckets - 1)


def locate(key: int, buckets: int) -> tuple[int, int, int]:
    """(fingerprint, bucket, other bucket) of a 64-bit key. Keys are hashes, so their bits are used directly."""
    fingerprint = (key & (FINGERPRINTS - 1)) or 1
    bucket = (key >> FINGERPRINT_BITS) & (buckets - 1)
    return fingerprint, bucket, bucket ^ alternate(fingerprint, buckets)


def key64(block_key: bytes) -> int:
    """The first 64 bits of a block key. They suffice for routing; the holder checks the whole key."""
    return int.from_bytes(block_key[:8], "little")


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Slots that changed between two states of one epoch, with their new fingerprints."""

    epoch: int
    base: int  # first seq
    seq: int  # resulting seq
    buckets: int
    changes: npt.NDArray[np.uint32]  # slot << 12 | fingerprint

    def pack(self) -> bytes:
        return _delta_head.pack(self.epoch, self.base, self.seq, self.buckets) + self.changes.astype("<u4").tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Delta:
        """Raises DigestError for anything that `pack` cannot have written."""
        if len(data) < _delta_head.size or len(data) % 4:
            raise DigestError("delta length")
        epoch, base, seq, buckets = _delta_head.unpack_from(data)
        if seq != base + 1:
            raise DigestError("delta state")
        changes = np.frombuffer(data, "<u4", offset=_delta_head.size)
        _check_buckets(buckets)
        if changes.size and int(changes.max() >> FINGERPRINT_BITS) >= buckets * LANES:
            raise DigestError("delta slot")
        return cls(epoch, base, seq, buckets, changes)


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A part of a full copy: the slots starting at `start`."""

    epoch: int
    seq: int
    buckets: int
    start: int
    slots: Slots

    def pack(self) -> bytes:
        """Two fingerprints in three bytes."""
        pairs = self.slots.astype(np.uint32).reshape(-1, 2)
        triples = (pairs[:, 0] | pairs[:, 1] << FINGERPRINT_BITS).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
        head = _page_head.pack(self.epoch, self.seq, self.buckets, self.start, self.slots.size)
        return head + triples.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Page:
        """Raises DigestError for anything that `pack` cannot have written."""
        if len(data) < _page_head.size:
            raise DigestError("page length")
        epoch, seq, buckets, start, count = _page_head.unpack_from(data)
        _check_buckets(buckets)
        if start % PAGE_SLOTS or count != min(PAGE_SLOTS, buckets * LANES - start):
            raise DigestError("page bounds")
        if len(data) != _page_head.size + count // 2 * 3:
            raise DigestError("page length")
        triples = np.frombuffer(data, np.uint8, offset=_page_head.size).reshape(-1, 3).astype(np.uint16)
        slots = np.empty((count // 2, 2), np.uint16)
        slots[:, 0] = triples[:, 0] | (triples[:, 1] & 0xF) << 8
        slots[:, 1] = triples[:, 1] >> 4 | triples[:, 2] << 4
        return cls(epoch, seq, buckets, start, slots.reshape(-1))


def _check_buckets(buckets: int) -> None:
    if not 2 <= buckets <= MAX_BUCKETS or buckets & (buckets - 1):
        raise DigestError("bucket count")


class CuckooDigest:
    """The owner's side: add and discard keys, then take the changes. Keys are unsigned 64-bit hashes.

    Raises ValueError if the keys do not fit into MAX_BUCKETS.
    """

    def __init__(self, epoch: int, expected_keys: int = 64) -> None:
        self.epoch, self.seq = epoch, 0
        self._keys: set[int] = set()
        self._rebuild(_buckets_for(expected_keys))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        """The answer that a reader of the present state gets."""
        fingerprint, first, second = locate(key, self.buckets)
        return fingerprint in self._bucket(first) or fingerprint in self._bucket(second)

    def add(self, key: int) -> None:
        """Idempotent."""
        if key not in self._keys:
            self._keys.add(key)
            if len(self._keys) > LOAD_LIMIT * self.buckets * LANES or not self._insert(key):
                self._grow()

    def discard(self, key: int) -> None:
        """Idempotent. It clears any slot with the key's fingerprint, because equal fingerprints share both buckets."""
        if key not in self._keys:
            return
        self._keys.remove(key)
        fingerprint, first, second = locate(key, self.buckets)
        for bucket in (first, second):
            for slot in range(bucket * LANES, bucket * LANES + LANES):
                if self._slots[slot] == fingerprint:
                    self._set(slot, 0)
                    return
        raise AssertionError("a key that was added has no slot")

    @property
    def changed(self) -> bool:
        """Whether there are changes for `take_delta`."""
        return bool(self._dirty)

    def begin_epoch(self, epoch: int) -> None:
        """Continue in a new epoch, so that readers need a full copy."""
        self.epoch, self.seq = epoch, 0
        self._dirty.clear()

    def take_delta(self, limit: int = 300) -> Delta | None:
        """Up to `limit` slots that changed since the last call; None if there are none. Call it until it returns None.

        A reader that has applied only some deltas of a round may miss keys that were moved; after the last delta it has
        all keys.
        """
        if not self._dirty:
            return None
        taken = sorted(self._dirty)[:limit]
        self._dirty.difference_update(taken)
        changes = np.array([slot << FINGERPRINT_BITS | self._slots[slot] for slot in taken], np.uint32)
        self.seq += 1
        return Delta(self.epoch, self.seq - 1, self.seq, self.buckets, changes)

    def pages(self) -> Iterator[Page]:
        """A full copy of the state after the last delta. Raises RuntimeError if there are changes for `take_delta`."""
        if self._dirty:
            raise RuntimeError("take the delta first: a full copy must equal the state its seq names")
        return pages_of(self.epoch, self.seq, np.array(self._slots, np.uint16))

    def _bucket(self, bucket: int) -> list[int]:
        return self._slots[bucket * LANES : bucket * LANES + LANES]

    def _set(self, slot: int, fingerprint: int) -> None:
        self._slots[slot] = fingerprint
        self._dirty.add(slot)

    def _insert(self, key: int) -> bool:
        """Place the key, moving other keys to their other bucket if necessary. Returns False if there is no room."""
        fingerprint, first, second = locate(key, self.buckets)
        for bucket in (first, second):
            if self._fill(bucket, fingerprint):
                return True
        bucket = first
        for kick in range(MAX_KICKS):  # the victim's lane advances, so a replayed run moves the same keys
            slot = bucket * LANES + (kick + fingerprint) % LANES
            victim = self._slots[slot]
            self._set(slot, fingerprint)
            fingerprint, bucket = victim, bucket ^ alternate(victim, self.buckets)
            if self._fill(bucket, fingerprint):
                return True
        return False

    def _fill(self, bucket: int, fingerprint: int) -> bool:
        for slot in range(bucket * LANES, bucket * LANES + LANES):
            if not self._slots[slot]:
                self._set(slot, fingerprint)
                return True
        return False

    def _grow(self) -> None:
        self.epoch, self.seq = following(self.epoch), 0
        self._rebuild(self.buckets * 2)

    def _rebuild(self, buckets: int) -> None:
        while True:
            if buckets > MAX_BUCKETS:
                raise ValueError(f"a digest holds at most {int(MAX_BUCKETS * LANES * LOAD_LIMIT)} keys")
            self.buckets = buckets
            self._dirty: set[int] = set()
            slots, rest = _placed(np.fromiter(self._keys, np.uint64, len(self._keys)), buckets)
            self._slots: list[int] = slots.tolist()
            if all(self._insert(key) for key in rest.tolist()):
                self._dirty.clear()
                return
            buckets *= 2


def _placed(keys: npt.NDArray[np.uint64], buckets: int) -> tuple[Slots, npt.NDArray[np.uint64]]:
    """(slots, the keys that are not in them): every key in its first or second bucket, if that has room without moving
    other keys. A table that has grown has room for nearly all. The owner's event loop waits for this: one by one, the
    keys take ten times as long."""
    slots, left = np.zeros((buckets, LANES), np.uint16), np.sort(keys)
    used = np.zeros(buckets, np.int64)
    for second in (False, True):
        fingerprints = (left & np.uint64(FINGERPRINTS - 1)).astype(np.uint16)
        fingerprints[fingerprints == 0] = 1
        bucket = (left >> np.uint64(FINGERPRINT_BITS) & np.uint64(buckets - 1)).astype(np.int64)
        if second:
            bucket ^= alternates(fingerprints, buckets)
        order = np.argsort(bucket, kind="stable")
        count = np.bincount(bucket, minlength=buckets)
        begin = np.cumsum(count) - count
        lane = np.empty(len(left), np.int64)
        lane[order] = np.arange(len(left)) - begin[bucket[order]]
        lane += used[bucket]
        fits = lane < LANES
        slots[bucket[fits], lane[fits]] = fingerprints[fits]
        used = np.minimum(LANES, used + count)
        left = left[~fits]
    return slots.ravel(), left


def _buckets_for(keys: int) -> int:
    buckets = 2
    while buckets * LANES * LOAD_LIMIT < keys:
        buckets *= 2
    return buckets


def pages_of(epoch: int, seq: int, slots: Slots) -> Iterator[Page]:
    """A full copy, split into packets."""
    for start in range(0, slots.size, PAGE_SLOTS):
        yield Page(epoch, seq, slots.size // LANES, start, slots[start : start + PAGE_SLOTS])


def assemble(pages: Iterable[Page]) -> tuple[int, int, Slots] | None:
    """(epoch, seq, slots) of a full copy; None if pages are missing. All pages must belong to one state."""
    parts = {page.start: page for page in pages}
    if not parts:
        return None
    first = next(iter(parts.values()))
    if sum(page.slots.size for page in parts.values()) != first.buckets * LANES:
        return None
    slots = np.concatenate([parts[start].slots for start in sorted(parts)])
    return first.epoch, first.seq, slots

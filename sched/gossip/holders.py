"""Finds the holders of a prefix in the digests of all nodes: the depth of a key chain per node, in microseconds. Pure.

A row of the table has one bucket of all nodes, with the bucket's four fingerprints packed into one word:

    words: uint64 [buckets, nodes]         lane i of a word = bits 16 i .. 16 i + 15

so a key costs two contiguous rows and one test of all nodes. The result is a Python integer with bit j set for node j,
and is cached. Filters cannot distinguish two keys with the same fingerprint and buckets, so one mask serves all of
them, and a changed slot identifies the only mask that it can change. Cached masks therefore always equal the table
(tests check this), and a chain costs one dict lookup and one AND per block until no node is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sched.gossip.digest import FINGERPRINT_BITS, FINGERPRINTS, LANES, Delta, Slots, alternates, key64

KEPT_MASKS = 1 << 16
"""Maximum number of cached masks per table; then all are dropped. About 24 MB at 1,024 nodes."""

Key = int | bytes
"""A 64-bit key, or a block key, of which the first 64 bits are used."""

Cell = list[int]
"""One mask, updated in place."""

Words = npt.NDArray[np.uint64]
_ONES = np.uint64(0x0001_0001_0001_0001)
_TOPS = np.uint64(0x8000_8000_8000_8000)


class Holders:
    """Digests of the cell's nodes. A node keeps its index while it is a member; a freed index is reused."""

    def __init__(self) -> None:
        self.nodes: list[str | None] = []  # by index
        self._index: dict[str, int] = {}
        self._state: dict[str, tuple[int, int]] = {}  # (epoch, seq) of the digest held
        self._table_of: dict[str, _Table] = {}
        self._tables: dict[int, _Table] = {}  # by number of buckets: nodes of one size share a table

    # --- nodes and their digests

    def admit(self, node_id: str) -> int:
        """The node's index; it holds nothing until its digest is loaded."""
        if node_id not in self._index:
            free = self.nodes.index(None) if None in self.nodes else len(self.nodes)
            self.nodes[free : free + 1] = [node_id]
            self._index[node_id] = free
        return self._index[node_id]

    def forget(self, node_id: str) -> None:
        """The node is gone: drop its digest and free its index."""
        if node_id in self._index:
            self._drop_digest(node_id)
            self.nodes[self._index.pop(node_id)] = None

    def index(self, node_id: str) -> int | None:
        return self._index.get(node_id)

    def state(self, node_id: str) -> tuple[int, int] | None:
        """(epoch, seq) of the digest held of this node."""
        return self._state.get(node_id)

    def load(self, node_id: str, epoch: int, seq: int, slots: Slots) -> None:
        """Store a full copy (`digest.assemble`) of an admitted node's digest."""
        index = self._index[node_id]
        self._drop_digest(node_id)
        buckets = slots.size // LANES
        table = self._tables.get(buckets) or self._tables.setdefault(buckets, _Table(buckets))
        table.load(index, slots)
        self._table_of[node_id], self._state[node_id] = table, (epoch, seq)

    def slots(self, node_id: str) -> Slots:
        """The held digest of this node, in the form of `load`. Raises KeyError if there is none."""
        return self._table_of[node_id].slots(self._index[node_id])

    def apply(self, node_id: str, delta: Delta) -> bool:
        """Apply a delta. Returns False if it does not follow the held state, so that a full copy is needed."""
        table = self._table_of.get(node_id)
        if table is None or self._state[node_id] != (delta.epoch, delta.base) or table.buckets != delta.buckets:
            return False
        table.apply(self._index[node_id], delta.changes)
        self._state[node_id] = (delta.epoch, delta.seq)
        return True

    def _drop_digest(self, node_id: str) -> None:
        table = self._table_of.pop(node_id, None)
        self._state.pop(node_id, None)
        if table is not None:
            table.load(self._index[node_id], np.zeros(table.buckets * LANES, np.uint16))
            if not any(other is table for other in self._table_of.values()):
                del self._tables[table.buckets]

    # --- matching

    def mask(self, key: Key) -> int:
        """Bit j is set if node j holds the key, or rarely by a false positive of its filter."""
        found = 0
        for table in self._tables.values():
            found |= table.mask(key)
        return found

    def levels(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """(depth, mask of the nodes that hold at least `depth` leading keys) wherever the mask changes, ascending.

        No node holds more than the last level. The walk ends at the first key that none of the remaining nodes holds.
        """
        table = next(iter(self._tables.values())) if len(self._tables) == 1 else None
        search, kept = (self.mask, {}) if table is None else (table.mask, table.kept)
        found, left, depth = [], -1, 0
        for key in keys:
            cell = kept.get(key)  # inlined from a table's `mask`: saves a call per key
            held = left & (search(key) if cell is None else cell[0])
            if held != left:
                if depth:
                    found.append((depth, left))
                left = held
                if not left:
                    return found
            depth += 1
        if depth:
            found.append((depth, left))
        return found

    def reached(self, wanted: Iterable[tuple[int, Iterable[Key]]], among: int) -> list[tuple[int, int]]:
        """For borders with the keys that a node must hold to go on there: (border, mask of the nodes that hold them all
        and are in no mask before), without those that nobody reaches. `among`: mask of the nodes in question. Ends when
        all of them have been found."""
        found = []
        for border, keys in wanted:
            if not among:
                break
            held = among
            for key in keys:
                held &= self.mask(key)
                if not held:
                    break
            if held:
                found.append((border, held))
                among &= ~held
        return found

    def best_hits(self, keys: Sequence[Key]) -> npt.NDArray[np.int32]:
        """Leading keys of the chain that each node holds: int32 [len(self.nodes)], by index."""
        width, levels = (len(self.nodes) + 7) // 8, self.levels(keys)
        raw = np.frombuffer(b"".join(mask.to_bytes(width, "little") for _, mask in levels), np.uint8)
        held = np.unpackbits(raw.reshape(len(levels), width), axis=1, count=len(self.nodes), bitorder="little")
        steps = np.diff([0, *(depth for depth, _ in levels)]).astype(np.float32)  # floats: BLAS multiplies
        return (steps @ held.astype(np.float32)).astype(np.int32)


@lru_cache
def _alternates(buckets: int) -> list[int]:
    """`digest.alternate` of every fingerprint."""
    found: list[int] = alternates(np.arange(FINGERPRINTS, dtype=np.uint16), buckets).tolist()
    return found


class _Table:
    """Filters of one size. A column is a node, at its index in Holders."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self._words: Words = np.zeros((buckets, 8), "<u8")
        self.kept: dict[Key, Cell] = {}  # never replaced by another dict
        self._cells: dict[int, Cell] = {}  # by class: the lower bucket << 12 | fingerprint; keys of a class share one
        self._other = _alternates(buckets)

    def load(self, node: int, slots: Slots) -> None:
        """Replace a node's column."""
        self._drop_masks()
        if node >= self._words.shape[1]:
            wider = np.zeros((self.buckets, max(node + 1, 2 * self._words.shape[1])), "<u8")
            wider[:, : self._words.shape[1]] = self._words
            self._words = wider
        self._words[:, node] = np.ascontiguousarray(slots, "<u2").view("<u8")

    def slots(self, node: int) -> Slots:
        return self._words[:, node].copy().view("<u2")

    def apply(self, node: int, changes: npt.NDArray[np.uint32]) -> None:
        """Write the changed slots, and update the cached masks of the old and the new fingerprints."""
        slots, fingerprints = changes >> FINGERPRINT_BITS, (changes & (FINGERPRINTS - 1)).astype(np.uint16)
        buckets, lanes = slots // LANES, node * LANES + slots % LANES
        cells = self._words.view("<u2")
        before = cells[buckets, lanes]
        cells[buckets, lanes] = fingerprints
        bit = 1 << node
        cells_of = self._cells
        for bucket, old, new in zip(buckets.tolist(), before.tolist(), fingerprints.tolist(), strict=True):
            if old and (cell := cells_of.get(self._class(old, bucket))) and not self._holds(node, old, bucket):
                cell[0] &= ~bit
            if new and (cell := cells_of.get(self._class(new, bucket))):
                cell[0] |= bit

    def mask(self, key: Key) -> int:
        cell = self.kept.get(key)
        if cell is None:
            if len(self.kept) >= KEPT_MASKS:
                self._drop_masks()
            cell = self.kept[key] = self._cell(key)
        return cell[0]

    def _cell(self, key: Key) -> Cell:
        """The mask of the key's class (digest.locate, with the alternates from a table)."""
        number = key if isinstance(key, int) else key64(key)
        fingerprint = (number & (FINGERPRINTS - 1)) or 1
        name = self._class(fingerprint, (number >> FINGERPRINT_BITS) & (self.buckets - 1))
        cell = self._cells.get(name)
        if cell is None:
            first = name >> FINGERPRINT_BITS
            cell = self._cells[name] = [self._search(fingerprint, first, first ^ self._other[fingerprint])]
        return cell

    def _drop_masks(self) -> None:
        self.kept.clear()
        self._cells.clear()

    def _search(self, fingerprint: int, first: int, second: int) -> int:
        """Test all nodes: a lane XOR the fingerprint is zero if the two are equal."""
        wanted = np.uint64(fingerprint) * _ONES
        a, b = self._words[first] ^ wanted, self._words[second] ^ wanted
        found = ((a - _ONES) & ~a | (b - _ONES) & ~b) & _TOPS
        return int.from_bytes(np.packbits(found != 0, bitorder="little").tobytes(), "little")

    def _class(self, fingerprint: int, bucket: int) -> int:
        return min(bucket, bucket ^ self._other[fingerprint]) << FINGERPRINT_BITS | fingerprint

    def _holds(self, node: int, fingerprint: int, bucket: int) -> bool:
        words = self._words[[bucket, bucket ^ self._other[fingerprint]], node]
        return bool((np.ascontiguousarray(words).view(np.uint16) == fingerprint).any())

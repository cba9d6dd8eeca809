"""Who holds a prefix, as far as the digests of all nodes tell: depth per node of a chain of keys in microseconds. Pure.

A row of the table is one bucket of all nodes, a bucket's four fingerprints packed into one word:

    words: uint64 [buckets, nodes]         lane i of a word = bits 16 i .. 16 i + 15

so one key costs two contiguous rows and a test of all nodes at once. The answer is a Python integer with bit j set for
node j, and is kept: filters cannot tell two keys apart that share fingerprint and buckets, so one kept mask answers
for all of them, and a changed slot names exactly the mask it may change. Kept masks thus always equal the table
(the tests hold them to it), and a chain costs one dict look-up and one AND per block until nobody is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sched.gossip.digest import FINGERPRINT_BITS, FINGERPRINTS, LANES, Delta, Slots, alternate, key64

KEPT_MASKS = 1 << 16
"""Keys whose masks are kept per table before all are dropped and collected again: about 24 MB at 1,024 nodes."""

Key = int | bytes
"""A 64-bit key, or a block key of which the first 64 bits count."""

Cell = list[int]
"""One mask, which changes in place."""

Words = npt.NDArray[np.uint64]
_ONES = np.uint64(0x0001_0001_0001_0001)
_TOPS = np.uint64(0x8000_8000_8000_8000)


class Holders:
    """Digests of the cell's nodes. A node keeps its index as long as it is here; a freed index is used again."""

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
        """The node is gone, and with it all it held."""
        if node_id in self._index:
            self._drop_digest(node_id)
            self.nodes[self._index.pop(node_id)] = None

    def index(self, node_id: str) -> int | None:
        return self._index.get(node_id)

    def state(self, node_id: str) -> tuple[int, int] | None:
        """(epoch, seq) of the digest held of this node."""
        return self._state.get(node_id)

    def load(self, node_id: str, epoch: int, seq: int, slots: Slots) -> None:
        """Take a full copy (`digest.assemble`) of a node that was admitted."""
        index = self._index[node_id]
        self._drop_digest(node_id)
        buckets = slots.size // LANES
        table = self._tables.get(buckets) or self._tables.setdefault(buckets, _Table(buckets))
        table.load(index, slots)
        self._table_of[node_id], self._state[node_id] = table, (epoch, seq)

    def slots(self, node_id: str) -> Slots:
        """The digest held of this node, as `load` took it. Raises KeyError when there is none."""
        return self._table_of[node_id].slots(self._index[node_id])

    def apply(self, node_id: str, delta: Delta) -> bool:
        """Apply a delta that follows the state held; False when it does not, then a full copy is needed."""
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
        """Bit j is set when node j holds the key, or, seldom, when its filter only seems to."""
        found = 0
        for table in self._tables.values():
            found |= table.mask(key)
        return found

    def levels(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """(depth, mask of the nodes that hold at least `depth` leading keys), only where the mask changes, ascending.

        Nobody beyond the last level holds more. The prefix property does the rest: the walk ends at the first key
        that nobody left holds.
        """
        table = next(iter(self._tables.values())) if len(self._tables) == 1 else None
        search, kept = (self.mask, {}) if table is None else (table.mask, table.kept)
        found, left, depth = [], -1, 0
        for key in keys:
            cell = kept.get(key)  # what a table's `mask` begins with: a call less per key
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

    def best_hits(self, keys: Sequence[Key]) -> npt.NDArray[np.int32]:
        """Leading keys of the chain that each node holds: int32 [len(self.nodes)], by index."""
        width, levels = (len(self.nodes) + 7) // 8, self.levels(keys)
        raw = np.frombuffer(b"".join(mask.to_bytes(width, "little") for _, mask in levels), np.uint8)
        held = np.unpackbits(raw.reshape(len(levels), width), axis=1, count=len(self.nodes), bitorder="little")
        steps = np.diff([0, *(depth for depth, _ in levels)]).astype(np.float32)  # as floats: the product is BLAS's
        return (steps @ held.astype(np.float32)).astype(np.int32)


@lru_cache
def _alternates(buckets: int) -> list[int]:
    """`digest.alternate` of every fingerprint."""
    return [alternate(fingerprint, buckets) for fingerprint in range(FINGERPRINTS)]


class _Table:
    """Filters of one size: columns are nodes, by the index that Holders gave them."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self._words: Words = np.zeros((buckets, 8), "<u8")
        self.kept: dict[Key, Cell] = {}  # always this object
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
        """Write the changed slots; kept masks that the old or the new fingerprints can concern follow."""
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
        """That of the key's class (digest.locate, with the alternates looked up)."""
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
        """Test all nodes: a lane is zero after exclusive-or with the fingerprint where the two are equal."""
        wanted = np.uint64(fingerprint) * _ONES
        a, b = self._words[first] ^ wanted, self._words[second] ^ wanted
        found = ((a - _ONES) & ~a | (b - _ONES) & ~b) & _TOPS
        return int.from_bytes(np.packbits(found != 0, bitorder="little").tobytes(), "little")

    def _class(self, fingerprint: int, bucket: int) -> int:
        return min(bucket, bucket ^ self._other[fingerprint]) << FINGERPRINT_BITS | fingerprint

    def _holds(self, node: int, fingerprint: int, bucket: int) -> bool:
        words = self._words[[bucket, bucket ^ self._other[fingerprint]], node]
        return bool((np.ascontiguousarray(words).view(np.uint16) == fingerprint).any())

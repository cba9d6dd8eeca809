"""Reads LMDB's file page by page without LMDB: the content of its trees, and whether LMDB can open it safely.

LMDB trusts its file. A flipped bit in a page of its trees or in its list of free pages crashes the process that reads
it, immediately or many writes later. So before LMDB opens the file, this code reads every page of the trees with read
calls and checks everything that LMDB relies on; a bad sector is an OSError instead of a SIGBUS. Values are not read:
their checksums are checked at each read, and the header of a value's first page before LMDB frees it (`check_value`).

Format of LMDB 0.9 on 64 bits, little endian. A page starts with its number and its kind. The two meta pages alternate;
the one with the later transaction is valid. It has the roots of two trees: free pages by the transaction that freed
them, and the named databases, each a record with the root of its tree. Leaves and branches have an array of offsets
after the header, and nodes packed without gaps at the end of the page. A large value is a run of pages, to which its
node points.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

import numpy as np

from cache.ssd.direct import PAGE
from cache.ssd.medium import Damaged

HEADER = Struct("<QHHHH")  # page number, padding, kind, end of the offsets, start of the nodes
RUN_HEADER = Struct("<QHHI")  # page number, padding, kind, pages
NODE = Struct("<HHHH")  # low and high half of a size, flags, bytes of the key
META = Struct("<II8x8x48s48sQQ")  # magic, version, the two trees, last page, transaction
TREE = Struct("<IHHQQQQQ")  # padding, flags, depth, branches, leaves, pages of runs, entries, root
MAGIC, FORMAT = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META_PAGE = 1, 2, 4, 8  # kinds of pages
BIG, SUBTREE = 1, 2  # flags of nodes: the value is a run of pages; the value is a tree
INTEGER_KEYS = 8  # flags of a tree
EMPTY = (1 << 64) - 1  # root of a tree without entries
DEPTH_MAX = 32


class Run(NamedTuple):
    """A value in separate pages."""

    page: int
    nbytes: int

    @property
    def pages(self) -> int:
        return -(-(HEADER.size + self.nbytes) // PAGE)

    @property
    def offset(self) -> int:
        """File offset of its first byte."""
        return self.page * PAGE + HEADER.size


Leaf = tuple[bytes, bytes | Run, int]
"""(key, value, flags of the node)"""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree as its record describes it."""

    name: str
    flags: int
    depth: int
    branches: int
    leaves: int
    run_pages: int
    entries: int
    root: int

    @staticmethod
    def unpack(name: str, record: bytes) -> Tree:
        if len(record) != TREE.size:
            raise Damaged(f"the record of tree {name} has {len(record)} bytes")
        padding, *rest = TREE.unpack(record)
        if name != "free" and padding:  # there it is the size of a page
            raise Damaged(f"the record of tree {name} has a padding of {padding}")
        return Tree(name, *rest)


class Pages:
    """The file `fd`, in whole pages. No other code may write it meanwhile. Raises Damaged, OSError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file_pages = os.fstat(fd).st_size // PAGE
        self._runs: list[tuple[int, int]] = []  # pages in use: (first, number)
        free, main, last = self._meta()
        self._end = last + 1
        if not 2 <= self._end <= self._file_pages:
            raise Damaged(f"its last page is {last}, the file has {self._file_pages}")
        self._databases = {
            key.decode(errors="replace"): self._record(key, value, flags) for key, value, flags in self._leaves(main)
        }
        self._check_free(self._leaves(free))

    def database(self, name: str) -> list[Leaf]:
        """All leaves of a named database, by key; empty if it does not exist. Call once per name, before `finish`."""
        record = self._databases.pop(name, None)
        if record is None:
            return []
        leaves = self._leaves(Tree.unpack(name, record)) if isinstance(record, bytes) else []
        if any(flags & SUBTREE for _, _, flags in leaves):
            raise Damaged(f"a tree within tree {name}")
        return leaves

    def finish(self) -> None:
        """Call after all databases have been read. Checks that no page has two uses."""
        if any(isinstance(record, bytes) for record in self._databases.values()):
            raise Damaged(f"unknown databases {sorted(self._databases)}")
        runs = np.array(self._runs, np.int64).reshape(-1, 2)
        starts = np.concatenate([runs[:, 0], self._free])
        ends = starts + np.concatenate([runs[:, 1], np.ones(len(self._free), np.int64)])
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        if len(starts) and (starts[0] < 2 or ends[-1] > self._end or bool((ends[:-1] > starts[1:]).any())):
            raise Damaged("a page is used twice or lies outside the file")

    # --- meta pages and records

    def _meta(self) -> tuple[Tree, Tree, int]:
        """(tree of free pages, tree of databases, last page in use) of the last transaction."""
        found = []
        for number in (0, 1):
            page = os.pread(self._fd, PAGE, number * PAGE)
            if len(page) < PAGE:
                raise Damaged("the file is cut short")
            pgno, _, kind, _, _ = HEADER.unpack_from(page)
            magic, version, free, main, last, transaction = META.unpack_from(page, HEADER.size)
            if (magic, version, pgno, kind) != (MAGIC, FORMAT, number, META_PAGE):
                raise Damaged(f"page {number} is not a meta page")
            if transaction and transaction % 2 != number:
                raise Damaged(f"meta page {number} belongs to transaction {transaction}")
            if int.from_bytes(free[:4], "little") != PAGE:
                raise Damaged(f"meta page {number} has a page size other than {PAGE} bytes")
            found.append((transaction, free, main, last))
        self.transaction, free, main, last = max(found, key=lambda row: row[0])
        trees = Tree.unpack("free", free), Tree.unpack("main", main)
        if trees[0].flags != INTEGER_KEYS or trees[1].flags:
            raise Damaged("the meta page has unknown flags")
        return *trees, last

    def _record(self, key: bytes, value: bytes | Run, flags: int) -> bytes | None:
        """The record of a database; None for a plain value."""
        if flags & SUBTREE and isinstance(value, bytes):
            if Tree.unpack(repr(key), value).flags:
                raise Damaged(f"database {key!r} has unknown flags")
            return value
        return None

    def _check_free(self, leaves: list[Leaf]) -> None:
        """Check that every free page is listed once, in the order that LMDB requires."""
        lists = [np.empty(0, np.int64)]
        for key, value, flags in leaves:
            data = self._value(value) if isinstance(value, Run) else value
            transaction = int.from_bytes(key, "little")
            if flags & SUBTREE or len(key) != 8 or not 0 < transaction <= self.transaction or len(data) < 8:
                raise Damaged("a list of free pages is malformed")
            numbers = np.frombuffer(data, "<u8", len(data) // 8)
            count = int(numbers[0])
            if count >= len(numbers):
                raise Damaged("a list of free pages is cut short")
            listed = numbers[1 : 1 + count]
            if bool((listed >= self._end).any() or (listed[:-1] <= listed[1:]).any()):
                raise Damaged("a list of free pages is out of order")
            lists.append(listed.astype(np.int64))
        self._free = np.concatenate(lists)

    def _value(self, run: Run) -> bytes:
        check_value(self._fd, run)
        data = os.pread(self._fd, run.nbytes, run.offset)
        if len(data) < run.nbytes:
            raise Damaged("a value is cut short")
        return data

    # --- trees

    def _leaves(self, tree: Tree) -> list[Leaf]:
        """All entries, in order. Counts the pages and records them as used."""
        if tree.root == EMPTY:
            if tree.entries or tree.depth or tree.branches or tree.leaves or tree.run_pages:
                raise Damaged(f"tree {tree.name} has entries and no root")
            return []
        walk = _Walk(self, tree)
        walk.page(tree.root, 1)
        counted = (walk.branches, walk.leaves, walk.run_pages, len(walk.out))
        if counted != (tree.branches, tree.leaves, tree.run_pages, tree.entries):
            raise Damaged(f"the counts of tree {tree.name} differ from its record")
        keys = [key for key, _, _ in walk.out]
        if tree.name == "free":
            numbers = [int.from_bytes(key, "little") for key in keys]
            in_order = all(a < b for a, b in pairwise(numbers))
        else:
            in_order = all(a < b for a, b in pairwise(keys))
        if not in_order:
            raise Damaged(f"keys of tree {tree.name} are out of order")
        self._runs += walk.used
        return walk.out

    def nodes(self, number: int) -> tuple[int, bytes, list[tuple[int, int, int, int]]]:
        """Kind and content of a page of a tree; (offset, size, flags, key bytes) of each node."""
        if not 2 <= number < self._end:
            raise Damaged(f"page {number} is outside the file")
        page = os.pread(self._fd, PAGE, number * PAGE)
        if len(page) < PAGE:
            raise Damaged("the file is cut short")
        pgno, _, kind, lower, upper = HEADER.unpack_from(page)
        if pgno != number or kind not in (BRANCH, LEAF):
            raise Damaged(f"page {number} is not a tree page")
        count = (lower - HEADER.size) // 2
        if lower % 2 or not HEADER.size < lower <= upper < PAGE:
            raise Damaged(f"page {number} is out of its bounds")
        out, extents = [], []
        for (offset,) in Struct("<H").iter_unpack(page[HEADER.size : lower]):
            if not upper <= offset <= PAGE - NODE.size:
                raise Damaged(f"a node of page {number} is out of bounds")
            low, high, flags, key_bytes = NODE.unpack_from(page, offset)
            size = low | high << 16
            rest = 0 if kind == BRANCH else 8 if flags & BIG else size
            nbytes = NODE.size + key_bytes + rest
            out.append((offset, size, flags, key_bytes))
            extents.append((offset, offset + nbytes + nbytes % 2))
        extents.sort()
        starts, ends = [start for start, _ in extents], [end for _, end in extents]
        if len(out) != count or starts[0] != upper or ends[-1] != PAGE or starts[1:] != ends[:-1]:
            raise Damaged(f"the nodes of page {number} overlap")
        return kind, page, out


class _Walk:
    """A walk through one tree."""

    def __init__(self, pages: Pages, tree: Tree) -> None:
        self.out: list[Leaf] = []
        self.used: list[tuple[int, int]] = []
        self.branches = self.leaves = self.run_pages = 0
        self._pages = pages
        self._tree = tree
        self._seen: set[int] = set()

    def page(self, number: int, depth: int) -> None:
        if number in self._seen or depth > min(self._tree.depth, DEPTH_MAX):
            raise Damaged(f"tree {self._tree.name} has a cycle or is too deep at page {number}")
        self._seen.add(number)
        self.used.append((number, 1))
        kind, page, nodes = self._pages.nodes(number)
        if kind == BRANCH:
            self.branches += 1
            for _, size, flags, _ in nodes:
                self.page(size | flags << 32, depth + 1)
            return
        if depth != self._tree.depth:
            raise Damaged(f"tree {self._tree.name} does not have depth {self._tree.depth} at page {number}")
        self.leaves += 1
        self.out += self._entries(page, nodes)

    def _entries(self, page: bytes, nodes: list[tuple[int, int, int, int]]) -> Iterator[Leaf]:
        for offset, size, flags, key_bytes in nodes:
            start = offset + NODE.size
            key = page[start : start + key_bytes]
            if flags == BIG:
                run = Run(int.from_bytes(page[start + key_bytes : start + key_bytes + 8], "little"), size)
                if run.page >= 1 << 48:
                    raise Damaged("a value is outside the file")
                self.run_pages += run.pages
                self.used.append((run.page, run.pages))
                yield key, run, flags
            elif flags in (0, SUBTREE):
                yield key, page[start + key_bytes : start + key_bytes + size], flags
            else:
                raise Damaged(f"tree {self._tree.name} has a node with unknown flags")


def check_value(fd: int, run: Run) -> None:
    """Check the header of a value's first page, which LMDB trusts when it frees the pages. Raises Damaged, OSError."""
    header = os.pread(fd, RUN_HEADER.size, run.page * PAGE)
    if len(header) < RUN_HEADER.size:
        raise Damaged("the file is cut short")
    pgno, _, kind, pages = RUN_HEADER.unpack(header)
    if (pgno, kind, pages) != (run.page, OVERFLOW, run.pages):
        raise Damaged(f"page {run.page} does not begin a value of {run.pages} pages")

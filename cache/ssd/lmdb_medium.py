"""LmdbMedium: blocks in one LMDB file of fixed size.

A block is two records written in one transaction: its bytes, in separate pages and in the arena's format (one copy,
made by LMDB without the GIL), and an index entry (checksum, length, sequence number of the write, note). Writes go to
the mapping without sync. The offset of a value in the file is known from its write or from startup, so reads do not use
LMDB: they are read calls at that offset, from the page cache if it has all pages, otherwise past it.

LMDB opens the file only after every page of its trees has been checked (cache/ssd/lmdb_pages.py), and frees a value's
pages only after their header has been checked. If a check fails, the whole file is dropped: it was a cache.

Blocks are evicted before the file is full, because LMDB reuses freed pages two transactions later and large blocks need
contiguous pages. Small blocks share a transaction; large blocks would not benefit.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Any

import lmdb

from cache.arena import Buffer
from cache.block import KEY_BYTES, BlockKey
from cache.ssd import note
from cache.ssd.claim import SsdError
from cache.ssd.direct import PAGE, DirectFile, address_of
from cache.ssd.lmdb_pages import Pages, Run, check_value
from cache.ssd.medium import Damaged, Entry, Found, Full, New
from cache.ssd.place import Place

log = logging.getLogger(__name__)

FILL = 0.8  # share of the map that blocks may take
SMALL_BYTES = 256 << 10  # maximum bytes of several blocks in one transaction
AHEAD_BYTES = 8 << 20  # writeback to disk starts after this many bytes, not all at the next sync
SPARE_BLOCKS = 3  # room for pages that are freed but not yet reusable
TREE_BYTES = 512  # generous size of both trees per block
VALUE_MIN = PAGE // 2  # shorter values are padded: otherwise they would share a leaf and move with it
ROW = Struct("<QQQ")  # index entry: checksum, length, sequence; followed by a note, except in rows of older versions
BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.BadTxnError)
_libc = ctypes.CDLL(None, use_errno=True)


class LmdbMedium:
    """`directory`/data.mdb of `nbytes`, with two databases:

    blocks  key -> the block's bytes
    index   key -> the known facts of the block

    Raises SsdError whose message names the remedy.
    """

    def __init__(self, directory: Path, slot_bytes: int, nbytes: int, root: bytes) -> None:
        self.slot_bytes = slot_bytes
        self.nbytes = nbytes - nbytes % PAGE
        self.capacity = _capacity(slot_bytes, self.nbytes)
        if self.capacity < 1:
            raise SsdError(f"--ssd-bytes {nbytes} is too small for blocks of {slot_bytes} bytes: raise it")
        self.batch = max(1, min(64, SMALL_BYTES // slot_bytes, self.capacity // 8))
        self.path = directory / "data.mdb"
        self._sequence = 0
        self._unsent = 0  # bytes written whose writeback has not started
        self._left: tuple[list[Found], list[Found]] = [], []
        self._retired: list[_Values] = []
        self._place = Place(
            directory, "lmdb", ("data.mdb",), self.nbytes, root=root, slot_bytes=slot_bytes, lasting=False
        )
        try:
            self._look()
            self._open()
            self._place.opened()
        except BaseException:
            self._place.close(clean=False)
            raise

    def adopt(self) -> tuple[list[Found], list[Found]]:
        left, self._left = self._left, ([], [])
        return left

    # --- blocks

    def write(self, rows: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        self._check(erase)
        with self._transaction() as txn:
            for key, _ in erase:
                self._delete(txn, key)
            places = []
            for row in rows:
                txn.put(row.key, _filled_up(row.memory), db=self._blocks)
                places.append(self._values.offset_of(txn.get(row.key, db=self._blocks)))
                self._put_row(txn, row.key, Entry(0, row.checksum, len(row.memory), row.facts, row.kept))
        self._unsent += sum(len(row.memory) for row in rows)
        if self._unsent >= AHEAD_BYTES:
            self._unsent = 0
            self._values.file.begin_writing()
        return [
            Entry(place, row.checksum, len(row.memory), row.facts, row.kept)
            for place, row in zip(places, rows, strict=True)
        ]

    def erase(self, rows: Sequence[Found]) -> None:
        self._check(rows)
        with self._transaction() as txn:
            for key, _ in rows:
                self._delete(txn, key)

    def mark(self, rows: Sequence[Found]) -> None:
        with self._transaction() as txn:
            for key, entry in rows:
                self._put_row(txn, key, entry)

    def _put_row(self, txn: Any, key: BlockKey, entry: Entry) -> None:
        row = ROW.pack(entry.checksum, entry.length, self._sequence)
        txn.put(key, row + note.pack(entry.facts, entry.kept), db=self._index)
        self._sequence += 1

    def read(self, entry: Entry, into: memoryview) -> None:
        self._values.read(entry.place, entry.length, into)

    def read_part(self, entry: Entry, begin: int, into: memoryview) -> None:
        self._values.read(entry.place + begin, len(into), into)

    def sync(self) -> None:
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise OSError(str(error)) from error

    def _delete(self, txn: Any, key: BlockKey) -> None:
        txn.delete(key, db=self._blocks)
        txn.delete(key, db=self._index)

    def _check(self, rows: Sequence[Found]) -> None:
        """Check the headers of pages before LMDB frees them, because it trusts these headers."""
        for _, entry in rows:
            if entry.place >= 0:
                page = entry.place // PAGE
                check_value(self._values.file.fd, Run(page, max(entry.length, VALUE_MIN)))

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Raises Full, Damaged, OSError."""
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                yield txn
        except lmdb.MapFullError as error:
            raise Full(str(error)) from error
        except BROKEN as error:
            raise Damaged(str(error)) from error
        except lmdb.Error as error:
            raise OSError(str(error)) from error

    # --- life

    def renew(self) -> None:
        self._env.close()
        self._retire()
        self._place.drop()
        self._place.opening()
        self._open()
        self._place.opened()

    def close(self) -> None:
        clean = False
        try:
            self._env.sync(True)
            self._env.close()
            clean = True
        except lmdb.Error as error:
            log.warning("%s: the last sync failed (%s)", self.path, error)
        finally:
            for values in (self._values, *self._retired):
                values.close()
            self._place.close(clean=clean)

    def _look(self) -> None:
        """Read the existing file, and drop it if LMDB cannot open it safely. LMDB's list of readers is always dropped:
        no other process has the file open, and a killed reader would pin freed pages forever."""
        (self.path.parent / "lock.mdb").unlink(missing_ok=True)
        if self.path.exists():
            try:
                self._read_pages()
            except (Damaged, OSError) as error:
                log.warning("%s is damaged (%s); starting with an empty tier", self.path, error)
                self._place.drop()

    def _read_pages(self) -> None:
        """Read the index that earlier processes wrote, oldest block first, without reading the blocks."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = Pages(fd)
            values, rows = pages.database("blocks"), pages.database("index")
            pages.finish()
        finally:
            os.close(fd)
        runs = {key: value for key, value, _ in values if isinstance(value, Run) and len(key) == KEY_BYTES}
        if len(runs) < len(values):
            raise Damaged("the bytes are not a block")
        good: list[tuple[int, Found]] = []
        bad: list[Found] = []
        for key, row, _ in rows:
            run = runs.pop(key, None)
            known = isinstance(row, bytes) and len(row) in (ROW.size, ROW.size + note.NOTE.size)
            found, length, sequence = ROW.unpack_from(row) if known and isinstance(row, bytes) else (0, 0, 0)
            about = note.unpack(row[ROW.size :]) if isinstance(row, bytes) and len(row) > ROW.size and known else ()
            self._sequence = max(self._sequence, sequence + 1 if sequence < 1 << 48 else 0)
            if run is not None and 0 < length <= self.slot_bytes and max(length, VALUE_MIN) == run.nbytes:
                good.append((sequence, (key, Entry(run.offset, found, length, *about))))
            else:
                bad.append((key, _entry(run)))
        bad += [(key, _entry(run)) for key, run in runs.items()]
        self._left = [row for _, row in sorted(good)], bad

    def _open(self) -> None:
        fresh = not self.path.exists()
        self._place.opening()
        try:
            self._env = self._open_map()
            self._values = _Values(self.path)
        except BaseException as error:
            if fresh:
                self._place.drop()  # leave no large file after a failed attempt
            if isinstance(error, lmdb.Error):
                raise SsdError(f"cannot open {self.path} ({error}): give another --ssd-path or --ssd-bytes") from error
            raise

    def _open_map(self) -> Any:
        env = lmdb.open(
            str(self.path.parent), map_size=self.nbytes, max_dbs=2, writemap=True, sync=False, map_async=True
        )
        try:
            self._place.set_aside(self.path, self.nbytes)  # LMDB has made a sparse file of that size
            self._blocks, self._index = (env.open_db(name) for name in (b"blocks", b"index"))
            for number in (0, 1):  # the second reads the list of free pages
                with env.begin(write=True) as txn:
                    txn.put(b"opened", b"%d %d" % (os.getpid(), number))
        except BaseException:
            env.close()
            raise
        return env

    def _retire(self) -> None:
        """Delete the file. Running reads keep it open, but it no longer takes disk space. A failed renewal may have
        deleted it already."""
        with suppress(FileNotFoundError), open(self.path, "r+b") as file:
            file.truncate(0)
        self._retired.append(self._values)


class _Values:
    """Reads values at their offsets, from the page cache if it has the whole value."""

    def __init__(self, path: Path) -> None:
        self._base = map_address(path)
        self.file = DirectFile(path)

    def offset_of(self, view: Buffer) -> int:
        """The file offset of a view of the map."""
        return address_of(view) - self._base

    def read(self, offset: int, nbytes: int, into: memoryview) -> None:
        self.file.read(offset, nbytes, into, cached=resident(self._base + offset, nbytes))

    def close(self) -> None:
        self.file.close()


def _entry(run: Run | None) -> Entry:
    """The entry of a block that is about to be erased."""
    return Entry(-1, 0, 0) if run is None else Entry(run.offset, 0, run.nbytes)


def _filled_up(memory: Buffer) -> Buffer:
    return memory if len(memory) >= VALUE_MIN else bytes(memory).ljust(VALUE_MIN, b"\0")


def _capacity(slot_bytes: int, nbytes: int) -> int:
    """Number of blocks that fit safely; each takes a run of pages with a 16-byte header."""
    cost = -(-(max(slot_bytes, VALUE_MIN) + 16) // PAGE) * PAGE + TREE_BYTES
    usable = nbytes - 16 * PAGE
    return min(int(FILL * usable) // cost, usable // cost - SPARE_BLOCKS)


def resident(address: int, nbytes: int) -> bool:
    """Whether all pages of this part of a map are in memory. (A read with RWF_NOWAIT would also tell, but it would
    start to read ahead data that the direct read then reads again.)"""
    start = address - address % PAGE
    pages = (ctypes.c_ubyte * -(-(address + nbytes - start) // PAGE))()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), pages):
        return False
    return all(page & 1 for page in pages)


def map_address(path: Path) -> int:
    """The address at which this process has mapped the start of the file. Raises SsdError if the kernel does not
    tell."""
    inode, name = path.stat().st_ino, str(path.resolve())  # the device number differs on overlay file systems
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise SsdError(f"--ssd-path needs /proc/self/maps ({error.strerror})") from error
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and int(words[4]) == inode and words[5] == name and int(words[2], 16) == 0:
            return int(words[0].partition("-")[0], 16)
    raise SsdError(f"{path} is not mapped here: give another --ssd-path")

"""SlotMedium: blocks in one preallocated file of equal slots, written and read past the page cache.

    slots   block i is at i * stride, stride = the slot size rounded up to pages
    table   row i describes slot i: key, checksum, length, sequence number, note, and a checksum of these

A block is written into a free slot before its row, so a row never points to bytes that were not written. If the machine
crashes in between, or a slot was overwritten while its old row is still on disk, the checksum of the block shows it. So
nothing must be dropped after a power failure, and damage affects only single blocks. The table is small (64 bytes per
block) and is written through the page cache.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct

from xxhash import xxh3_64_intdigest

from cache.block import BlockKey
from cache.ssd import note
from cache.ssd.claim import SsdError
from cache.ssd.direct import PAGE, DirectFile, aligned
from cache.ssd.medium import Entry, Found, Full, New
from cache.ssd.place import Place

log = logging.getLogger(__name__)

ROW = Struct("<16sQI4sQ16sQ")  # key, checksum, length, note's start, sequence, note's end, checksum of the row
COVERED = ROW.size - 8
NOTHING = bytes(ROW.size)


class SlotMedium:
    """`directory`/slots and table, `nbytes` in total. Raises SsdError, whose message names the remedy."""

    batch = 1

    def __init__(self, directory: Path, slot_bytes: int, nbytes: int, root: bytes) -> None:
        self._slot_bytes = slot_bytes
        self._stride = aligned(slot_bytes)
        self._slots = (nbytes - PAGE) // (self._stride + ROW.size)
        self.capacity = self._slots - 1  # a block is written before its victim is erased
        if self.capacity < 1:
            raise SsdError(f"--ssd-bytes {nbytes} is too small for blocks of {slot_bytes} bytes: raise it")
        if slot_bytes >= 1 << 32:
            raise SsdError(f"--ssd-backend file has no room for blocks of {slot_bytes} bytes: give --ssd-backend lmdb")
        self._directory = directory
        self._sequence = 0
        self._free: deque[int] = deque()
        self._unerased: list[int] = []  # slots whose row still describes an erased block
        self._retired: list[DirectFile] = []
        self._place = Place(
            directory, "file", ("slots", "table"), nbytes, root=root, slot_bytes=slot_bytes, lasting=True
        )
        try:
            self._place.opening()
            self._open()
            self._place.opened()
        except BaseException:
            self._place.close(clean=False)
            raise

    def _open(self) -> None:
        fresh = not (self._directory / "slots").exists()
        sizes = {"slots": self._slots * self._stride, "table": aligned(self._slots * ROW.size)}
        try:
            for name, nbytes in sizes.items():
                self._place.set_aside(self._directory / name, nbytes)
        except SsdError:
            if fresh:
                self._place.drop()
            raise
        self._file = DirectFile(self._directory / "slots", writable=True)
        self._table = os.open(self._directory / "table", os.O_RDWR | os.O_CLOEXEC)

    def adopt(self) -> tuple[list[Found], list[Found]]:
        found: dict[bytes, tuple[int, Entry]] = {}
        damaged = 0
        for slot, row in enumerate(self._rows()):
            if row == NOTHING:
                self._free.append(slot)
                continue
            key, block_checksum, length, start, sequence, end, row_checksum = ROW.unpack(row)
            before = found.get(key)
            if (
                row_checksum != xxh3_64_intdigest(row[:COVERED])
                or not 0 < length <= self._slot_bytes
                or (before is not None and before[0] > sequence)
            ):
                damaged += row_checksum != xxh3_64_intdigest(row[:COVERED])
                self._free.append(slot)
                continue
            if before is not None:
                self._free.append(before[1].place)
            found[key] = sequence, Entry(slot, block_checksum, length, *note.unpack(start + end))
            self._sequence = max(self._sequence, sequence + 1)
        if damaged:
            log.warning("%d rows of %s are damaged: their blocks are lost", damaged, self._directory / "table")
        return [(key, entry) for key, (_, entry) in sorted(found.items(), key=lambda item: item[1][0])], []

    def _rows(self) -> list[bytes]:
        table = bytearray()
        while len(table) < self._slots * ROW.size:
            try:
                piece = os.pread(self._table, 16 << 20, len(table))
            except OSError as error:  # a bad sector: the blocks of its rows are lost
                log.warning("%s: %s", self._directory / "table", error.strerror)
                piece = bytes(PAGE)
            table += piece
        return [bytes(table[at : at + ROW.size]) for at in range(0, self._slots * ROW.size, ROW.size)]

    # --- blocks

    def write(self, rows: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for row in rows:
                if not self._free:
                    raise Full("every slot is in use")
                slot = self._free.popleft()
                entries.append(Entry(slot, row.checksum, len(row.memory), row.facts, row.kept))
                self._file.write(slot * self._stride, row.memory)
            for row, entry in zip(rows, entries, strict=True):
                self._put_row(row.key, entry)
        except (Full, OSError):
            self._free.extend(entry.place for entry in entries)  # last in the queue: this place may be bad
            raise
        self.erase(erase)
        return entries

    def erase(self, rows: Sequence[Found]) -> None:
        """If a row cannot be erased, every later call tries again; until it succeeds, the slot is not used and `sync`
        fails."""
        self._unerased += [entry.place for _, entry in rows]
        with suppress(OSError):
            self._erase()

    def mark(self, rows: Sequence[Found]) -> None:
        for key, entry in rows:
            self._put_row(key, entry)

    def _erase(self) -> None:
        while self._unerased:
            os.pwrite(self._table, NOTHING, self._unerased[0] * ROW.size)
            self._free.append(self._unerased.pop(0))

    def _put_row(self, key: BlockKey, entry: Entry) -> None:
        about = note.pack(entry.facts, entry.kept)
        row = ROW.pack(key, entry.checksum, entry.length, about[:4], self._sequence, about[4:], 0)[:COVERED]
        os.pwrite(self._table, row + xxh3_64_intdigest(row).to_bytes(8, "little"), entry.place * ROW.size)
        self._sequence += 1

    def read(self, entry: Entry, into: memoryview) -> None:
        self._file.read(entry.place * self._stride, entry.length, into)

    def read_part(self, entry: Entry, begin: int, into: memoryview) -> None:
        self._file.read(entry.place * self._stride + begin, len(into), into)

    def sync(self) -> None:
        if self._unerased:
            raise OSError(f"cannot erase {len(self._unerased)} rows of its table")
        os.fdatasync(self._file.fd)
        os.fdatasync(self._table)

    # --- life

    def renew(self) -> None:
        self._close_table()
        self._retired.append(self._file)
        with suppress(FileNotFoundError):
            os.truncate(self._directory / "slots", 0)  # running reads keep it open, but it no longer takes disk space
        self._place.drop()
        self._open()
        self._free = deque(range(self._slots))
        self._unerased.clear()

    def close(self) -> None:
        clean = False
        try:
            self.sync()
            clean = True
        except OSError as error:
            log.warning("%s: the last sync failed (%s)", self._directory, error)
        finally:
            for file in (self._file, *self._retired):
                file.close()
            self._close_table()
            self._place.close(clean=clean)

    def _close_table(self) -> None:
        if self._table >= 0:
            os.close(self._table)
            self._table = -1

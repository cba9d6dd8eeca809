"""SlotMedium: blocks in one preallocated file of equal slots, written and read past the page cache.

    slots   block i lies at i * stride, stride = the slot size rounded up to pages
    table   row i says what is in slot i: key, checksum, length, sequence number, and a checksum over these

A block is written into a free slot first and its row afterwards, so a row never names bytes that were not written by
this order; if the machine goes down in between, or a slot was written over whose old row is still on disk, the checksum
of the block tells. So nothing has to be thrown away after a power failure, and damage costs the blocks it is in. The
table is small (64 bytes per block) and goes through the page cache.
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

from cache.ssd.claim import SsdError
from cache.ssd.direct import PAGE, DirectFile, aligned
from cache.ssd.medium import Damaged, Entry, Found, Full, New
from cache.ssd.place import Place

log = logging.getLogger(__name__)

ROW = Struct("<16sQQQ16xQ")  # key, checksum, length, sequence, checksum of the row
COVERED = ROW.size - 8
NOTHING = bytes(ROW.size)


class SlotMedium:
    """`directory`/slots and table, `nbytes` together. Raises SsdError whose message names the remedy."""

    batch = 1

    def __init__(self, directory: Path, slot_bytes: int, nbytes: int, root: bytes) -> None:
        self._slot_bytes = slot_bytes
        self._stride = aligned(slot_bytes)
        self._slots = (nbytes - PAGE) // (self._stride + ROW.size)
        self.capacity = self._slots - 1  # a block is written before the one that goes for it is given up
        if self.capacity < 1:
            raise SsdError(f"--ssd-bytes {nbytes} is too small for blocks of {slot_bytes} bytes: raise it")
        self._directory = directory
        self._sequence = 0
        self._free: deque[int] = deque()
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
            key, block_checksum, length, sequence, told = ROW.unpack(row)
            before = found.get(key)
            if (
                told != xxh3_64_intdigest(row[:COVERED])
                or not 0 < length <= self._slot_bytes
                or (before is not None and before[0] > sequence)
            ):
                damaged += told != xxh3_64_intdigest(row[:COVERED])
                self._free.append(slot)
                continue
            if before is not None:
                self._free.append(before[1].place)
            found[key] = sequence, Entry(slot, block_checksum, length)
            self._sequence = max(self._sequence, sequence + 1)
        if damaged:
            log.warning("%d rows of %s are damaged: their blocks are gone", damaged, self._directory / "table")
        return [(key, entry) for key, (_, entry) in sorted(found.items(), key=lambda item: item[1][0])], []

    def _rows(self) -> list[bytes]:
        table = bytearray()
        while len(table) < self._slots * ROW.size:
            try:
                piece = os.pread(self._table, 16 << 20, len(table))
            except OSError as error:  # a bad sector: what its rows named is gone
                log.warning("%s: %s", self._directory / "table", error.strerror)
                piece = bytes(PAGE)
            table += piece
        return [bytes(table[at : at + ROW.size]) for at in range(0, self._slots * ROW.size, ROW.size)]

    # --- blocks

    def write(self, rows: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for _, memory, block_checksum in rows:
                if not self._free:
                    raise Full("every slot is taken")
                slot = self._free.popleft()
                entries.append(Entry(slot, block_checksum, len(memory)))
                self._file.write(slot * self._stride, memory)
        except (Full, OSError):
            self._free.extend(entry.place for entry in entries)  # behind the others: this place may be bad
            raise
        self.erase(erase)
        for (key, _, _), entry in zip(rows, entries, strict=True):
            covered = ROW.pack(key, entry.checksum, entry.length, self._sequence, 0)[:COVERED]
            self._put_row(entry.place, covered + xxh3_64_intdigest(covered).to_bytes(8, "little"))
            self._sequence += 1
        return entries

    def erase(self, rows: Sequence[Found]) -> None:
        for _, entry in rows:
            self._put_row(entry.place, NOTHING)
            self._free.append(entry.place)

    def _put_row(self, slot: int, row: bytes) -> None:
        try:
            os.pwrite(self._table, row, slot * ROW.size)
        except OSError as error:
            raise Damaged(f"its table cannot be written: {error.strerror}") from error

    def read(self, entry: Entry, into: memoryview) -> None:
        self._file.read(entry.place * self._stride, entry.length, into)

    def sync(self) -> None:
        os.fdatasync(self._file.fd)
        os.fdatasync(self._table)

    # --- life

    def renew(self) -> None:
        self._close_table()
        self._retired.append(self._file)
        with suppress(FileNotFoundError):
            os.truncate(self._directory / "slots", 0)  # reads under way keep it open, but it takes no room any more
        self._place.drop()
        self._open()
        self._free = deque(range(self._slots))

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

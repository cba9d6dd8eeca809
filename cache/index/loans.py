"""Slots that a home lends to processes of its host, which write blocks into them without asking.

    head     number of the next announcement, announcements so far, mood of the owner
    page     the rows of one borrower
    row      state, slot, length, key, checksum: one lent slot

A borrower writes a block into a lent slot, then its length, key and checksum into the row, and last the number of its
announcement into the state of the row. From then on the slot is the owner's again, and the put is done: the owner takes
in what was announced, in the order of the numbers, before it answers any question about blocks
(cache/server/lending.py). The owner alone writes FREE and LENT.

An owner that no longer looks for announcements on its own is ASLEEP: the borrower wakes it. One that is CLOSED may not
take in what is announced now, so the borrower asks it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from cache.block import KEY_BYTES, BlockKey
from net import compiled
from net.compiled import NotCompiled
from net.transfer.common.memory import Region

LOANS_REGION = "store-loans"
SOURCE = Path(__file__).with_name("block_read.c")
SHORT_BYTES = 240  # the C code hashes only longer blocks
WORD = 8
HEAD_WORDS, ROW_WORDS = 8, 5
NEXT_NUMBER, ANNOUNCED, MOOD = range(3)  # words of the head
STATE, PLACE, KEY, CHECKSUM = 0, 1, 2, 4  # words of a row; the place is a slot and, above 32 bits, a length
PAGES, PAGE_ROWS = 64, 64
PAGE_WORDS = PAGE_ROWS * ROW_WORDS
LOANS_BYTES = WORD * (HEAD_WORDS + PAGES * PAGE_WORDS)
FREE, LENT, FIRST_NUMBER = 0, 1, 2
AWAKE, ASLEEP, CLOSED = range(3)


class Filled(NamedTuple):
    """An announced block."""

    number: int
    row: int
    key: BlockKey
    length: int
    checksum: int


class Loans:
    """The rows in `region`, of LOANS_BYTES: for the owner, and for a borrower. Raises ValueError for another size."""

    def __init__(self, region: Region) -> None:
        if region.nbytes != LOANS_BYTES:
            raise ValueError(f"region {region.name!r} has {region.nbytes} bytes instead of {LOANS_BYTES}")
        self.region = region
        self._words = region.memory.cast("Q")
        self._fence = Lock()

    # --- the owner

    @classmethod
    def new(cls) -> Loans:
        """All rows are free."""
        loans = cls(Region.shared(LOANS_REGION, LOANS_BYTES))
        loans._words[NEXT_NUMBER] = FIRST_NUMBER
        return loans

    @property
    def announced(self) -> int:
        """Announcements so far. Look at it before the rows: what is announced later then shows in the next look."""
        return self._words[ANNOUNCED]

    @property
    def next_number(self) -> int:
        """The number of the next announcement."""
        return self._words[NEXT_NUMBER]

    @property
    def mood(self) -> int:
        return self._words[MOOD]

    @mood.setter
    def mood(self, mood: int) -> None:
        """What is announced, but not seen in `announced` after this, has a borrower that sees this mood."""
        self._words[MOOD] = mood
        with self._fence:  # taking a lock is a full memory barrier: no later read passes this write
            pass

    def lend(self, page: int, row: int, slot: int) -> None:
        """The borrower of the page may write into the slot from now on."""
        at = _at(page, row)
        self._words[at + PLACE] = slot
        self._words[at + STATE] = LENT

    def clear(self, page: int, row: int) -> None:
        """The row lends nothing any more. Its borrower must have announced a block, or must be gone."""
        self._words[_at(page, row) + STATE] = FREE

    def filled(self, page: int) -> list[Filled]:
        """The announced blocks of a page, in any order."""
        found = []
        for row, state in enumerate(self.states(page)):
            if state >= FIRST_NUMBER:
                at = _at(page, row)
                key = self._words[at + KEY : at + CHECKSUM].tobytes()
                found.append(Filled(state, row, key, self._words[at + PLACE] >> 32, self._words[at + CHECKSUM]))
        return found

    # --- both

    def states(self, page: int) -> list[int]:
        """Of all rows of a page: FREE, LENT, or the number of an announcement."""
        at = _at(page, 0)
        return self._words[at : at + PAGE_WORDS : ROW_WORDS].tolist()

    def slot(self, page: int, row: int) -> int:
        """The slot of a lent row."""
        return self._words[_at(page, row) + PLACE] & 0xFFFFFFFF

    def address(self, page: int, row: int) -> int:
        """Where the row is in this process."""
        return self.region.address + WORD * _at(page, row)

    def close(self) -> None:
        """The region stays."""
        self._words.release()


def _at(page: int, row: int) -> int:
    return HEAD_WORDS + page * PAGE_WORDS + row * ROW_WORDS


class LoanWrite:
    """The C code that fills a lent slot. The constructor may compile it, which takes half a second. Raises
    NotCompiled."""

    def __init__(self) -> None:
        library = compiled.library(SOURCE)
        if not library.usable():
            raise NotCompiled("this machine has no AVX2")
        pointer = ctypes.c_void_p
        self._fill = library.fill_loan
        self._fill.restype = ctypes.c_uint64
        self._fill.argtypes = [*(pointer, pointer, pointer, pointer, pointer, ctypes.c_size_t, ctypes.c_char_p)]

    def fill(
        self, loans: Loans, row_address: int, target: int, pieces: Sequence[tuple[int, int]], nbytes: int, key: BlockKey
    ) -> int:
        """Copies a block of `nbytes`, more than SHORT_BYTES, in pieces (address, bytes) to the address `target` of a
        lent slot, with its checksum, and announces it. Returns the owner's mood after that. Releases the interpreter
        lock. Both regions must stay mapped until it returns."""
        assert nbytes > SHORT_BYTES and len(key) == KEY_BYTES
        addresses, lengths = array("Q", [at for at, _ in pieces]), array("Q", [length for _, length in pieces])
        mood: int = self._fill(
            loans.region.address,
            row_address,
            target,
            addresses.buffer_info()[0],
            lengths.buffer_info()[0],
            nbytes,
            key,
        )
        return mood

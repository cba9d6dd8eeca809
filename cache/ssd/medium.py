"""Medium: what an SSD tier asks of what its blocks are kept in: the tier keeps the books, a medium the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cache.arena import Buffer
from cache.block import BlockKey
from cache.pool.policy import PLAIN, Facts


class Entry(NamedTuple):
    """Where a block lies and what it is. The tier has one per block, so a read asks nobody."""

    place: int  # the medium's own; -1: nowhere, only a record of it is left
    checksum: int
    length: int  # bytes
    facts: Facts = PLAIN
    kept: bool = False  # never evicted


class New(NamedTuple):
    """A block to be written."""

    key: BlockKey
    memory: Buffer
    checksum: int
    facts: Facts = PLAIN
    kept: bool = False


Found = tuple[BlockKey, Entry]


class Full(Exception):
    """No room for these blocks now: fewer, or after others were erased, there may be."""


class Damaged(Exception):
    """What is on disk cannot be what was written: the medium has to be renewed before it is written again."""


class Medium(Protocol):
    """`read` and `sync` may be called in any thread, the rest in one at a time. Trouble with the disk is an OSError."""

    capacity: int
    """Blocks that fit safely."""

    batch: int
    """Blocks that are best written together."""

    def adopt(self) -> tuple[list[Found], list[Found]]:
        """What earlier lives left: blocks, oldest first, and what is to be erased with the next write. Called once."""

    def write(self, rows: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        """All of it or nothing; entries of `rows`. Raises Full, Damaged, OSError."""

    def erase(self, rows: Sequence[Found]) -> None:
        """Raises Damaged, OSError."""

    def mark(self, rows: Sequence[Found]) -> None:
        """Facts and `kept` of blocks that are here are now as these entries say. Raises Full, Damaged, OSError."""

    def read(self, entry: Entry, into: memoryview) -> None:
        """Copy entry.length bytes to the start of `into`, whose rest may be overwritten. They are whatever lies there:
        the tier compares checksums. Raises OSError."""

    def renew(self) -> None:
        """Throw everything away and start empty. Reads under way get other bytes or an OSError. Raises SsdError,
        OSError; then only `renew`, again, and `close` may be called."""

    def sync(self) -> None:
        """What was written is on disk when this returns. Raises OSError."""

    def close(self) -> None:
        """Sync and give the directory back. No read is under way."""

"""Medium: the interface of an SSD tier's storage. The tier keeps the index; a medium keeps the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cache.arena import Buffer
from cache.block import BlockKey
from cache.pool.policy import PLAIN, Facts


class Entry(NamedTuple):
    """The place and description of a block. The tier has one per block, so a read needs no lookup on disk."""

    place: int  # defined by the medium; -1: no bytes, only a record is left
    checksum: int
    length: int  # bytes
    facts: Facts = PLAIN
    kept: bool = False  # never evicted


class New(NamedTuple):
    """A block to write."""

    key: BlockKey
    memory: Buffer
    checksum: int
    facts: Facts = PLAIN
    kept: bool = False


Found = tuple[BlockKey, Entry]


class Full(Exception):
    """No room for these blocks now. Fewer blocks may fit, or the same ones after an erasure."""


class Damaged(Exception):
    """The data on disk differs from the written data. The medium must be renewed before the next write."""


class Medium(Protocol):
    """`read`, `read_part` and `sync` are thread-safe; the other methods are called by one thread at a time. Disk
    failures raise OSError."""

    capacity: int
    """Number of blocks that fit safely."""

    batch: int
    """Best number of blocks per write."""

    def adopt(self) -> tuple[list[Found], list[Found]]:
        """Blocks of earlier processes, oldest first, and entries to erase with the next write. Called once."""

    def write(self, rows: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        """Write and erase everything or nothing; returns the entries of `rows`. Raises Full, Damaged, OSError."""

    def erase(self, rows: Sequence[Found]) -> None:
        """Raises Damaged, OSError."""

    def mark(self, rows: Sequence[Found]) -> None:
        """Update facts and `kept` of present blocks to these entries. Raises Full, Damaged, OSError."""

    def read(self, entry: Entry, into: memoryview) -> None:
        """Copy entry.length bytes to the start of `into`; its rest may be overwritten. The bytes are not verified: the
        tier compares checksums. Raises OSError."""

    def read_part(self, entry: Entry, begin: int, into: memoryview) -> None:
        """Fill `into` with the block's bytes from `begin` on. They are not verified. Raises OSError."""

    def renew(self) -> None:
        """Drop everything and start empty. Running reads get other bytes or an OSError. Raises SsdError, OSError; after
        an error, only `renew` and `close` may be called."""

    def sync(self) -> None:
        """Return when all written data is on disk. Raises OSError."""

    def close(self) -> None:
        """Sync and release the directory. No read may be running."""

"""The messages between transfer engines of programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DESCRIBE = "engine.describe"  # which memory is registered there, and how may this process copy it?
NOTIFY = "engine.notify"  # what a transfer was about
READ = "engine.read"  # a question over a data connection: the bytes of registered memory
WRITE = "engine.write"  # the same with bytes, which go to registered memory


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to DESCRIBE."""

    ranges: Sequence[tuple[int, int, str]]  # address, bytes, name of the region
    count: int  # of the word of proof, when these were the ranges
    boot: str = ""  # net.transfer.cma.process.Offer; empty: no copies between processes
    pid: int = 0
    address: int = 0
    proof: str = ""
    memfd: int = -1


@dataclass(frozen=True, slots=True)
class Notify:
    """NOTIFY."""

    name: str
    msg: str


@dataclass(frozen=True, slots=True)
class Places:
    """READ and WRITE: pieces of the asked program's memory, in order."""

    addresses: Sequence[int]
    lengths: Sequence[int]  # bytes, at least 1

    def __post_init__(self) -> None:
        if len(self.addresses) != len(self.lengths) or min(self.lengths, default=1) < 1:
            raise ValueError("every address needs a length of at least one byte")

"""The messages between transfer engines of programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DESCRIBE = "engine.describe"  # which memory is registered there, and how may this process copy it?
NOTIFY = "engine.notify"  # what a transfer was about


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to DESCRIBE."""

    ranges: Sequence[tuple[int, int, str]]  # address, bytes, name of the region
    count: int  # of the word of proof, when these were the ranges
    boot: str = ""  # net.transfer.cma.process.Offer; empty: only over TCP
    pid: int = 0
    address: int = 0
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Notify:
    """NOTIFY."""

    name: str
    msg: str

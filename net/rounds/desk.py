"""Desk: the shared memory between the process that asks and one that answers.

A region has the words of rounds.c in its first page, then the message, then the answer. Behind the words, the page
holds the head of the message: which kind of work it is, and its sizes. One more word says that the message waits for
those of other processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from net.rounds import native
from net.rounds.layout import PAGE, Layout
from net.transfer.common.memory import Region

ASKED_AT, ANSWERED_AT, NUMBER_BYTES = 0, 64, 8
"""Of the numbers of the last message, and of the last one that has its answer: Desk of rounds.c."""
HEAD_AT = 2048
HEAD_WORDS = 8
QUEUED_AT = HEAD_AT + 8 * HEAD_WORDS
SPIN_NS = 50_000
BEAT_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Message:
    """The numbers that came with a message; the rest lies in the region."""

    number: int
    head: list[int]


class Desk:
    """One end of a desk. `region`: from `new_region`, or the same memory attached in the other process."""

    def __init__(self, region: Region, layout: Layout) -> None:
        self.region, self.layout = region, layout
        self._view = ctypes.c_char.from_buffer(region.memory)  # the memory stays as long as this desk
        self.address = region.address
        self.message = region.address + PAGE
        self.answer = self.message + layout.message_bytes
        self._head = (ctypes.c_int64 * HEAD_WORDS).from_address(region.address + HEAD_AT)
        self._queued = ctypes.c_int64.from_address(region.address + QUEUED_AT)
        self._short = native.short()

    # --- the side that asks

    def ask(self, *head: int) -> None:
        """Send the message that lies in the region, with up to HEAD_WORDS numbers: the third and fourth are its rows
        and pairs. The last one must be answered."""
        for i, number in enumerate(head):
            self._head[i] = number
        self._short.mr_ask(self.address, self.asked + 1)

    def dismiss(self) -> None:
        """The process that answers may end: no message follows."""

    @property
    def asked(self) -> int:
        """The number of the last message."""
        return int(self._short.mr_asked(self.address))

    @property
    def idle(self) -> bool:
        """Whether every message has its answer."""
        return bool(self._short.mr_answered(self.address) == self.asked)

    @property
    def beats(self) -> int:
        """Grows as long as the other process runs."""
        return int(self._short.mr_beats(self.address))

    @property
    def queued(self) -> bool:
        """Whether the other process has the message, and works for somebody else first."""
        return bool(self._queued.value)

    # --- the side that answers

    def next_message(self, time_s: float) -> Message | None:
        """A message without an answer; None at the end of the time."""
        number = native.library().mr_await_message(self.address, SPIN_NS, yields(2), int(time_s * 1e9))
        return Message(int(number), list(self._head)) if number else None

    def answered(self, number: int, bell: Region) -> None:
        """The answer to a message lies in the region."""
        self._short.mr_answer(self.address, bell.address, number)

    def queue(self, waits: bool) -> None:
        """Say whether the message waits for work of others."""
        self._queued.value = int(waits)

    def live(self) -> None:
        """A sign of life of the process that answers."""
        self._short.mr_live(self.address)

    def close(self) -> None:
        self.region.close()


def new_region(name: str, layout: Layout) -> Region:
    """Raises OSError."""
    return Region.shared(name, desk_bytes(layout))


def desk_bytes(layout: Layout) -> int:
    return PAGE + layout.message_bytes + layout.answer_bytes


def new_bell(name: str) -> Region:
    """The bell that the answering processes ring. Raises OSError."""
    return Region.shared(name, PAGE)


def await_answers(desks: Sequence[Desk], bell: Region, time_s: float) -> list[bool]:
    """Which of the desks have answered: all, or those that have at the end of the time."""
    addresses = (ctypes.c_void_p * len(desks))(*(desk.address for desk in desks))
    spin = SPIN_NS, yields(len(desks) + 1), int(time_s * 1e9)
    done = native.library().mr_await_answers(addresses, len(desks), bell.address, *spin)
    return [bool(done >> i & 1) for i in range(len(desks))]


def yields(processes: int) -> int:
    """1 if a process that spins should give its core to others: there are fewer cores than processes."""
    return int(processes > len(os.sched_getaffinity(0)))


class Heart:
    """Beats for this process on a desk, in a thread that needs no interpreter. A context manager."""

    def __init__(self, desk: Desk) -> None:
        self._stop = ctypes.c_int32(0)
        self._heart = native.Heart(desk.address, BEAT_NS, ctypes.pointer(self._stop))
        self._thread = ctypes.c_uint64()
        if native.library().mr_beat(ctypes.addressof(self._heart), ctypes.addressof(self._thread)):
            raise OSError("no thread for the signs of life of this rank")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        native.library().mr_stop(ctypes.addressof(self._heart), ctypes.addressof(self._thread))

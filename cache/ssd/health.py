"""Health: what the disk of a tier is doing, since when, and what it fails at. Any thread may ask and tell.

A disk that stands still raises no error: the operation that waits for it just does not return. So every operation is
entered here before it begins. Reads and writes are judged apart, because a disk that is slow to sync may still read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

log = logging.getLogger(__name__)

READ_STALL_S = 1.0  # a read under way for longer means that the disk stands still; reads take milliseconds
WRITE_STALL_S = 5.0  # the same for writes and syncs, which may queue behind gigabytes of other data


class Health:
    """Of the disk that `name` lies on. `clock` gives seconds that never step."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.closed = ""  # why the tier cannot be used at all; empty when it can
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = count()
        self._underway: dict[int, tuple[str, float]] = {}
        self._failing: dict[str, str] = {}  # operation -> the error of its last try
        self._told = False  # that it stands still

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """One operation is under way: 'read', or any other name for what writes."""
        number = next(self._numbers)
        with self._lock:
            self._underway[number] = what, self._clock()
        try:
            yield
        finally:
            with self._lock:
                _, since = self._underway.pop(number)
                told = self._told and not self._underway
                if told:
                    self._told = False
            if told:
                log.warning("%s: the disk answers again after %.1f s", self._name, self._clock() - since)

    def worked(self, what: str) -> None:
        self._failing.pop(what, None)

    def failed(self, what: str, error: Exception) -> None:
        self._failing[what] = str(error)

    def renewed(self) -> None:
        """What failed before is over: there are other files now."""
        self._failing.clear()

    @property
    def failing(self) -> bool:
        """The last try of some operation failed."""
        return bool(self._failing)

    @property
    def reads_stalled(self) -> bool:
        return self._oldest_s("read") > READ_STALL_S

    @property
    def writes_stalled(self) -> bool:
        return self._oldest_s("write") > WRITE_STALL_S

    @property
    def trouble(self) -> str:
        """What is wrong, in words for an error message or a log; empty when nothing is."""
        if self.closed:
            return f"the SSD tier {self._name} is closed: {self.closed}"
        for kind, stalled in (("read", self.reads_stalled), ("write", self.writes_stalled)):
            if stalled:
                waited = self._oldest_s(kind)
                text = f"the disk of the SSD tier {self._name} has not answered a {kind} for {waited:.0f} s"
                self._tell(text)
                return text
        for what, error in list(self._failing.items()):
            return f"the disk of the SSD tier {self._name} fails ({what}: {error})"
        return ""

    def _oldest_s(self, kind: str) -> float:
        with self._lock:
            starts = [since for what, since in self._underway.values() if (what == "read") == (kind == "read")]
        return self._clock() - min(starts) if starts else 0.0

    def _tell(self, text: str) -> None:
        with self._lock:
            first, self._told = not self._told, True
        if first:
            log.warning("%s; until it answers, blocks that are only on this disk are misses", text)

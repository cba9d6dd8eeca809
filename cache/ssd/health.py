"""Health: tracks the running operations of a tier's disk and its failures. Thread-safe.

A disk that hangs raises no error: its operation does not return. So every operation is recorded here before it begins.
Reads and writes are judged separately, because a disk that is slow to sync may still read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

log = logging.getLogger(__name__)

READ_STALL_S = 1.0  # the disk hangs if a read takes longer; normal reads take milliseconds
WRITE_STALL_S = 5.0  # the same for writes and syncs, which may queue behind gigabytes of other data


class Health:
    """The health of the disk with `name`. `clock` returns monotonic seconds."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.closed = ""  # the reason why the tier cannot be used; empty if it can
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = count()
        self._underway: dict[int, tuple[str, float]] = {}
        self._failing: dict[str, str] = {}  # operation -> the error of its last try
        self._reported = False  # whether the hang has been logged

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Context of one operation: 'read', or any other name for an operation that writes."""
        number = next(self._numbers)
        with self._lock:
            self._underway[number] = what, self._clock()
        try:
            yield
        finally:
            with self._lock:
                _, since = self._underway.pop(number)
                reported = self._reported and not self._underway
                if reported:
                    self._reported = False
            if reported:
                log.warning("%s: the disk answers again after %.1f s", self._name, self._clock() - since)

    def worked(self, what: str) -> None:
        self._failing.pop(what, None)

    def failed(self, what: str, error: Exception) -> None:
        self._failing[what] = str(error)

    def renewed(self) -> None:
        """Clear all failures: the tier has new files."""
        self._failing.clear()

    @property
    def failing(self) -> bool:
        """Whether the last try of any operation failed."""
        return bool(self._failing)

    @property
    def reads_stalled(self) -> bool:
        return self._oldest_s("read") > READ_STALL_S

    @property
    def writes_stalled(self) -> bool:
        return self._oldest_s("write") > WRITE_STALL_S

    @property
    def trouble(self) -> str:
        """The failure as text for messages and logs; empty if there is none."""
        if self.closed:
            return f"the SSD tier {self._name} is closed: {self.closed}"
        for kind, stalled in (("read", self.reads_stalled), ("write", self.writes_stalled)):
            if stalled:
                waited = self._oldest_s(kind)
                text = f"the disk of the SSD tier {self._name} has not answered a {kind} for {waited:.0f} s"
                self._report(text)
                return text
        for what, error in list(self._failing.items()):
            return f"the disk of the SSD tier {self._name} fails ({what}: {error})"
        return ""

    def _oldest_s(self, kind: str) -> float:
        with self._lock:
            starts = [since for what, since in self._underway.values() if (what == "read") == (kind == "read")]
        return self._clock() - min(starts) if starts else 0.0

    def _report(self, text: str) -> None:
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            log.warning("%s; until it answers, blocks that are only on this disk are misses", text)

"""Ticket: one operation that ends later, in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ticket:
    """Ends once, well or with an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._then: list[Callable[[Ticket], None]] = []
        self.error: BaseException | None = None
        self.source = -1  # of a message, once it has begun

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self.error = error
            self._ended.set()
            then, self._then = self._then, []
        for call in then:
            call(self)

    def ended(self) -> bool:
        return self._ended.is_set()

    def then(self, call: Callable[[Ticket], None]) -> None:
        """`call` runs at the end, in the thread that ends the ticket; at once if it has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._then.append(call)
                return
        call(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """False if it has not ended within the time. Raises the error of the operation."""
        if not self._ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

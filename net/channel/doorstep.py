"""Limits connections that have not sent their hello yet, in total and per address. Pure.

A new connection beyond a limit replaces the one that has waited longest. Nodes send their hello within milliseconds, so
connections that wait longer are not from nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_WAITING = 256
MAX_WAITING_PER_ADDRESS = 64

Guest = TypeVar("Guest", bound=Hashable)


class Doorstep(Generic[Guest]):
    def __init__(self, most: int = MAX_WAITING, most_of_address: int = MAX_WAITING_PER_ADDRESS) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._waiting: dict[Guest, str] = {}  # in order of arrival
        self._of: Counter[str] = Counter()  # address -> number of waiting connections

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, guest: Guest, address: str) -> Guest | None:
        """Add `guest`. Returns the connection that must be closed for it, or None."""
        goes: Guest | None = None
        if self._of[address] >= self._most_of_address:
            goes = next(one for one, its in self._waiting.items() if its == address)
        elif len(self._waiting) >= self._most:
            goes = next(iter(self._waiting))
        if goes is not None:
            self.leave(goes)
        self._waiting[guest] = address
        self._of[address] += 1
        return goes

    def leave(self, guest: Guest) -> None:
        """`guest` has sent its hello or has ended. Idempotent."""
        address = self._waiting.pop(guest, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

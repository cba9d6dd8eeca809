"""Who has connected and not yet said who it is: few at a time, in all and of one address. Pure.

Whoever comes when there is no room takes the place of the one that has waited longest: a node says its hello within
milliseconds, so those that wait are not nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

MOST = 256
MOST_OF_ADDRESS = 64

Guest = TypeVar("Guest", bound=Hashable)


class Doorstep(Generic[Guest]):
    def __init__(self, most: int = MOST, most_of_address: int = MOST_OF_ADDRESS) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._waiting: dict[Guest, str] = {}  # in the order in which they came
        self._of: Counter[str] = Counter()  # address -> how many wait

    def __len__(self) -> int:
        return len(self._waiting)

    def come(self, guest: Guest, address: str) -> Guest | None:
        """`guest` waits from now on; who has to go for it, if anybody."""
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
        """It has said who it is, or has gone. Idempotent."""
        address = self._waiting.pop(guest, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

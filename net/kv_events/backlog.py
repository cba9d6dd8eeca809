"""The last batches, kept for subscribers that missed some. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class Backlog:
    """Numbers batches from 0 and keeps the last `most`."""

    def __init__(self, most: int) -> None:
        self.next = 0
        self._kept: deque[bytes] = deque(maxlen=most)

    def add(self, payload: bytes) -> int:
        """Returns the number of the batch."""
        self._kept.append(payload)
        self.next += 1
        return self.next - 1

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """(number, payload) of the batches from `first` on, oldest first, up to the one that is the last now. More may
        be added meanwhile: those that are no longer kept when it is their turn are left out."""
        for number in range(max(first, self.next - len(self._kept)), self.next):
            if (place := number - self.next + len(self._kept)) >= 0:
                yield number, self._kept[place]

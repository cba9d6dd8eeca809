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
        """(number, payload) of the kept batches from `first` on, oldest first."""
        oldest = self.next - len(self._kept)
        for number in range(max(first, oldest), self.next):
            yield number, self._kept[number - oldest]

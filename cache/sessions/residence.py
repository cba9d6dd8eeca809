"""Residence: how long a block that nobody reads stays in a full memory: blocks / evictions per second. Pure."""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 20.0
"""Evictions of this time count; a little more, because looks are not exactly this far apart."""

PAUSE_S = 1.0
"""Between two looks that are remembered."""


class Residence:
    """Of a memory of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._looks: deque[tuple[float, int]] = deque()

    def seen(self, now: float, evictions: int) -> None:
        """The memory has evicted this number of blocks until now. `now` and `evictions` may not go back."""
        if not self._looks or now - self._looks[-1][0] >= PAUSE_S:
            self._looks.append((now, evictions))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def seconds(self) -> float:
        """By the evictions of the last WINDOW_S; infinite without any."""
        if len(self._looks) < 2 or self._looks[-1][1] == self._looks[0][1]:
            return math.inf
        (begin, before), (end, after) = self._looks[0], self._looks[-1]
        return self._blocks * (end - begin) / (after - before)

"""Heat: which blocks a home is asked for so often that others should have them too. Pure.

Counts are halved every `half_life_s`, so a count is about the reads of the last one and a half half-lives. A block
with `threshold` of them gets one replica more, with twice as many two more, and so on: the load per replica stays
bounded, and the number of replicas grows with the logarithm of the popularity only.
"""

from __future__ import annotations

from cache.block import BlockKey

KEYS_MAX = 1 << 16  # counted at once; the coldest half is forgotten beyond it


class Heat:
    """Reads by key."""

    def __init__(self, threshold: float = 64.0, half_life_s: float = 10.0) -> None:
        self._threshold = threshold
        self._half_life_s = half_life_s
        self._counts: dict[BlockKey, float] = {}
        self._halved_at = 0.0

    def read(self, now: float, key: BlockKey) -> int:
        """One read of `key`; returns how many replicas it deserves beyond the usual."""
        if now - self._halved_at >= self._half_life_s:
            self._halve(now)
        count = self._counts[key] = self._counts.get(key, 0.0) + 1.0
        if count < self._threshold:
            if len(self._counts) > KEYS_MAX:
                self._forget_half()
            return 0
        return int(count / self._threshold).bit_length()

    def _halve(self, now: float) -> None:
        periods = min(64, int((now - self._halved_at) / self._half_life_s))
        factor = 0.5**periods
        self._counts = {key: count * factor for key, count in self._counts.items() if count * factor >= 1.0}
        self._halved_at = now

    def _forget_half(self) -> None:
        order = sorted(self._counts, key=self._counts.__getitem__)
        for key in order[: len(order) // 2]:
            del self._counts[key]

    def __len__(self) -> int:
        return len(self._counts)

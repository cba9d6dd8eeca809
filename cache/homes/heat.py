"""Heat: which blocks a home is asked for so often that others should have them too, and until when. Pure.

Counts are halved every `half_life_s`, so a count is about the reads of the last one and a half half-lives. A block
with `threshold` of them gets one replica more, with twice as many two more, and so on: the load per replica stays
bounded, and the number of replicas grows with the logarithm of the popularity only. A home sees its share of the reads,
so a read of a block with k replicas counts k times.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.block import BlockKey

KEYS_MAX = 1 << 16  # counted at once; the coldest half is forgotten beyond it
RESIDENCY_S = 10.0
"""So long a block that was hot keeps its replicas at least, and as often copies that were evicted are made again."""


class Heat:
    """Reads by key."""

    def __init__(self, threshold: float = 64.0, half_life_s: float = 10.0) -> None:
        self._threshold = threshold
        self._half_life_s = half_life_s
        self._counts: dict[BlockKey, float] = {}
        self._halved_at = 0.0

    def read(self, now: float, key: BlockKey, weight: int = 1) -> int:
        """`weight` reads of `key`; returns how many replicas it deserves beyond the usual."""
        self._halve(now)
        count = self._counts[key] = self._counts.get(key, 0.0) + weight
        if count < self._threshold:
            if len(self._counts) > KEYS_MAX:
                self._forget_half()
            return 0
        return int(count / self._threshold).bit_length()

    def deserves(self, now: float, key: BlockKey) -> int:
        """The same without a read."""
        self._halve(now)
        return int(self._counts.get(key, 0.0) / self._threshold).bit_length()

    def _halve(self, now: float) -> None:
        if now - self._halved_at < self._half_life_s:
            return
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


class HotBlocks:
    """Of one home: its blocks that have more replicas than usual."""

    def __init__(self, heat: Heat | None = None) -> None:
        self.replicas: dict[BlockKey, int] = {}  # what readers are told, the usual ones included
        self._heat = Heat() if heat is None else heat
        self._wanted: dict[BlockKey, int] = {}
        self._spread_at: dict[BlockKey, float] = {}

    def __len__(self) -> int:
        return len(self.replicas)

    def read(self, now: float, key: BlockKey) -> None:
        """Somebody reads it here."""
        if extra := self._heat.read(now, key, self.replicas.get(key, 1)):
            self._wanted[key] = extra

    def take_wanted(self) -> dict[BlockKey, int]:
        """Blocks read since the last time that deserve more replicas than usual, and how many more."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def spread(self, now: float, key: BlockKey, count: int) -> bool:
        """It should have `count` replicas; True when they are to be made now: more than there were, or some may have
        been evicted since."""
        told = self.replicas.get(key, 0)
        if count <= told and now - self._spread_at[key] < RESIDENCY_S:
            return False
        self.replicas[key], self._spread_at[key] = max(count, told), now
        return True

    def cool(self, now: float, usual: int, here: Callable[[BlockKey], object]) -> None:
        """Tell readers of fewer replicas where heat has gone; `here(key)` is not None while this home has the block."""
        for key, told in list(self.replicas.items()):
            if here(key) is not None and now - self._spread_at[key] < RESIDENCY_S:
                continue
            count = usual + self._heat.deserves(now, key)
            if here(key) is None or count <= usual:
                del self.replicas[key], self._spread_at[key]
            elif count < told:
                self.replicas[key], self._spread_at[key] = count, now

"""Heat: finds blocks that are read so often that they need more replicas, and for how long. Pure.

Counts are halved every `half_life_s`, so a count covers about the last 1.5 half-lives. A block with `threshold` reads
gets one more replica, with twice as many reads two more, and so on: the load per replica stays bounded, and the number
of replicas grows only with the logarithm of the popularity. A home sees only its share of the reads, so a read of a
block with k replicas counts k times.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.block import BlockKey

KEYS_MAX = 1 << 16  # maximum number of counted keys; above it, the coldest half is forgotten
RESIDENCY_S = 10.0
"""Minimum time that a hot block keeps its replicas, and the interval at which evicted copies are made again,
seconds."""


class Heat:
    """Reads by key."""

    def __init__(self, threshold: float = 64.0, half_life_s: float = 10.0) -> None:
        self._threshold = threshold
        self._half_life_s = half_life_s
        self._counts: dict[BlockKey, float] = {}
        self._halved_at = 0.0

    def read(self, now: float, key: BlockKey, weight: int = 1) -> int:
        """Count `weight` reads of `key`. Returns the number of extra replicas that it deserves."""
        self._halve(now)
        count = self._counts[key] = self._counts.get(key, 0.0) + weight
        if count < self._threshold:
            if len(self._counts) > KEYS_MAX:
                self._forget_half()
            return 0
        return int(count / self._threshold).bit_length()

    def deserves(self, now: float, key: BlockKey) -> int:
        """The number of extra replicas that `key` deserves."""
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
    """The blocks of one home that have extra replicas."""

    def __init__(self, heat: Heat | None = None) -> None:
        self.replicas: dict[BlockKey, int] = {}  # number of replicas announced to readers, including the usual ones
        self._heat = Heat() if heat is None else heat
        self._wanted: dict[BlockKey, int] = {}
        self._spread_at: dict[BlockKey, float] = {}

    def __len__(self) -> int:
        return len(self.replicas)

    def read(self, now: float, key: BlockKey) -> None:
        """Count a read of the block on this home."""
        if extra := self._heat.read(now, key, self.replicas.get(key, 1)):
            self._wanted[key] = extra

    def take_wanted(self) -> dict[BlockKey, int]:
        """Blocks read since the last call that deserve extra replicas, with the number of extra replicas."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def spread(self, now: float, key: BlockKey, count: int) -> bool:
        """The block should have `count` replicas. Returns True if copies must be made now, because there are fewer or
        some may have been evicted."""
        announced = self.replicas.get(key, 0)
        if count <= announced and now - self._spread_at[key] < RESIDENCY_S:
            return False
        self.replicas[key], self._spread_at[key] = max(count, announced), now
        return True

    def cool(self, now: float, usual: int, here: Callable[[BlockKey], object]) -> None:
        """Announce fewer replicas of blocks that have cooled. `here(key)` is not None while this home has the block."""
        for key, announced in list(self.replicas.items()):
            if here(key) is not None and now - self._spread_at[key] < RESIDENCY_S:
                continue
            count = usual + self._heat.deserves(now, key)
            if here(key) is None or count <= usual:
                del self.replicas[key], self._spread_at[key]
            elif count < announced:
                self.replicas[key], self._spread_at[key] = count, now

"""Hot prefixes: what each node serves often, and from all nodes' short lists the hottest keys with holders. Pure.

A node counts the hits on the blocks it holds with exponential decay and tells its `TOLD` hottest keys, 12 bytes each.
Whoever has everybody's lists adds them up: heat is the sum, holders are those who list the key. Replication asks for
keys whose heat is out of proportion to their holders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import numpy.typing as npt

TOLD = 64
"""Keys in a node's list: 768 bytes, one packet."""

ENTRY = np.dtype([("key", "<u8"), ("heat", "<f4")])

NEWS = 0.25
"""A list is told anew when a key entered or left it or a heat moved by this share."""

HotList = npt.NDArray[np.void]
"""Structured array of ENTRY, hottest first."""


class HeatCounter:
    """Hits per key, in hits per second averaged over about `window_s`; at most `capacity` keys, coldest dropped."""

    def __init__(self, window_s: float = 10.0, capacity: int = 4096) -> None:
        self._window_s, self._capacity = window_s, capacity
        self._heat: dict[int, tuple[float, float]] = {}  # key -> (heat, as of)
        self._told: dict[int, float] = {}

    def hit(self, now: float, keys: Iterable[int]) -> None:
        """Requests came that use these blocks."""
        for key in keys:
            self._heat[key] = (self.heat(now, key) + 1 / self._window_s, now)
        if len(self._heat) > 2 * self._capacity:
            kept = nlargest(self._capacity, self._heat, key=lambda key: self.heat(now, key))
            self._heat = {key: self._heat[key] for key in kept}

    def forget(self, key: int) -> None:
        """The block is no longer here."""
        self._heat.pop(key, None)

    def heat(self, now: float, key: int) -> float:
        """Hits per second."""
        heat, since = self._heat.get(key, (0.0, now))
        return heat * math.exp(-max(0.0, now - since) / self._window_s)

    def take_list(self, now: float) -> HotList | None:
        """The list to tell, None when it says nothing new."""
        hottest = nlargest(TOLD, ((self.heat(now, key), key) for key in self._heat))
        fresh = {key: heat for heat, key in hottest if heat > 0.1 / self._window_s}
        if fresh.keys() == self._told.keys() and all(
            abs(heat - self._told[key]) <= NEWS * self._told[key] for key, heat in fresh.items()
        ):
            return None
        self._told = fresh
        return np.array(list(fresh.items()), ENTRY)


def pack_list(hot: HotList) -> bytes:
    return hot.astype(ENTRY).tobytes()


def unpack_list(data: bytes) -> HotList:
    """Raises ValueError for anything that `pack_list` cannot have written."""
    if len(data) % ENTRY.itemsize or len(data) > TOLD * ENTRY.itemsize:
        raise ValueError(f"a hot list has up to {TOLD} entries of {ENTRY.itemsize} bytes, got {len(data)} bytes")
    hot = np.frombuffer(data, ENTRY)
    if not np.isfinite(hot["heat"]).all() or (hot["heat"] < 0).any():
        raise ValueError("hot list with a heat that is negative or not finite")
    return hot


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key of the cell: how often it is used, in hits per second, and who says to hold it."""

    key: int
    heat: float
    holders: tuple[str, ...]


def hottest(lists: Mapping[str, HotList], count: int) -> list[HotKey]:
    """The `count` hottest keys over the nodes' lists, hottest first."""
    names = sorted(name for name in lists if lists[name].size)
    if not names:
        return []
    keys = np.concatenate([lists[name]["key"] for name in names])
    heats = np.concatenate([lists[name]["heat"] for name in names]).astype(np.float64)
    owners = np.repeat(np.arange(len(names)), [lists[name].size for name in names])
    unique, inverse = np.unique(keys, return_inverse=True)
    total = np.bincount(inverse, heats, unique.size)
    found = []
    for i in np.lexsort((unique, -total))[:count].tolist():
        holders = tuple(names[owner] for owner in owners[inverse == i].tolist())
        found.append(HotKey(int(unique[i]), float(total[i]), holders))
    return found

"""Estimates how much of a prompt each node holds, from the digests.

A node that holds a block of a chain also holds the blocks before it (chains are evicted leaf first), so a few keys of a
long chain suffice: with ANCHORS keys the depth is accurate to a 12th of the prompt and never too large. Nodes that are
asked report their exact depth.

If the layers of the model are in groups, a node can go on only at a border for which every group has what the next
token needs. So the depth of a node is that of the last such border, among those that `Borders` proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from sched.gossip.holders import Holders, Key
from sched.placement.links import Vector

ANCHORS = 12

KEPT_ANSWERS = 256
"""Maximum number of cached results. Prompts with a common prefix have the same depths."""


Places = npt.NDArray[np.intp]


class Borders(Protocol):
    """See cache/pool/borders.py."""

    def below(self, deepest: int, stride: int, ends: Iterable[int]) -> list[int]: ...

    def wanted(
        self, keys: Sequence[bytes], borders: Iterable[int], held: int = 0
    ) -> Iterable[tuple[int, Iterable[bytes]]]: ...


class Matcher:
    """Computes depths from the digests of `holders()`. borders: None = the model has one group."""

    def __init__(self, holders: Callable[[], Holders], borders: Borders | None = None) -> None:
        self._holders = holders
        self._borders = borders
        self._places: Places | None = None  # the nodes of the cached results
        self._kept: dict[tuple[object, ...], Vector] = {}

    def depths(self, keys: Sequence[Key], block_size: int, places: Places, each: int = 1) -> Vector | None:
        """Leading tokens of the prompt that each node holds: float64 [len(places)], or None if no node holds any.
        `places`: the nodes' indices in the holders, -1 = none; pass a new array for other nodes. `each`: some nodes
        have the keys only at multiples of this many. Do not modify the result."""
        stride = max(1, -(-len(keys) // ANCHORS))
        stride = -(-stride // each) * each
        holders = self._holders()
        levels = tuple(holders.levels(keys[stride - 1 :: stride]))
        if not levels:
            return None
        if self._borders is not None:
            levels, stride = _reached(self._borders, holders, cast("Sequence[bytes]", keys), levels, stride), 1
            if not levels:
                return None
        if places is not self._places or len(self._kept) >= KEPT_ANSWERS:
            self._places = places
            self._kept.clear()
        name = (stride, block_size, levels)
        found = self._kept.get(name)
        if found is None:
            depths = _spread(levels, len(holders.nodes)) * float(stride * block_size)
            found = self._kept[name] = depths.take(places)
            found.setflags(write=False)
        return found


Levels = tuple[tuple[int, int], ...]


def _reached(borders: Borders, holders: Holders, keys: Sequence[bytes], levels: Levels, stride: int) -> Levels:
    """Converts levels of `stride` blocks of group 0 to levels of one block, at which all groups can go on."""
    ends = []
    for at, (depth, mask) in enumerate(levels):
        only = mask & ~levels[at + 1][1] if at + 1 < len(levels) else mask
        low, high = depth * stride, min(len(keys), (depth + 1) * stride - 1)
        while low < high:  # the last border that one of these nodes has
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holders.mask(keys[middle - 1]) & only else (low, middle - 1)
        ends.append(low)
    wanted = borders.wanted(keys, borders.below(ends[-1], stride, ends))
    found, within = [], 0
    for border, mask in holders.reached(wanted, levels[0][1]):
        within |= mask
        found.append((border, within))
    return tuple(reversed(found))


def _spread(levels: Sequence[tuple[int, int]], size: int) -> Vector:
    """Converts (depth, mask of the nodes with at least this depth), ascending, to the depths of `size` nodes plus a
    final 0. Each mask is a subset of the previous one, so the number of masks with a node gives its last level."""
    width = (size + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for _, mask in levels]), np.uint8)
    within = np.unpackbits(raw.reshape(len(levels), width), axis=1, count=size, bitorder="little")
    found = np.zeros(size + 1)
    found[:size] = np.array([0, *(depth for depth, _ in levels)], np.float64)[within.sum(axis=0, dtype=np.uint8)]
    return found

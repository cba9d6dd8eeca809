"""Estimates how much of a prompt each node holds, from the digests.

A node that holds a block of a chain also holds the blocks before it (chains are evicted leaf first), so a few keys of a
long chain suffice: with ANCHORS keys the depth is accurate to a 12th of the prompt and never too large. Nodes that are
asked report their exact depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sched.gossip.holders import Holders, Key
from sched.placement.links import Vector

ANCHORS = 12

KEPT_ANSWERS = 256
"""Maximum number of cached results. Prompts with a common prefix have the same depths."""


Places = npt.NDArray[np.intp]


class Matcher:
    """Computes depths from the digests of `holders()`."""

    def __init__(self, holders: Callable[[], Holders]) -> None:
        self._holders = holders
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


def _spread(levels: Sequence[tuple[int, int]], size: int) -> Vector:
    """Converts (depth, mask of the nodes with at least this depth), ascending, to the depths of `size` nodes plus a
    final 0. Each mask is a subset of the previous one, so the number of masks with a node gives its last level."""
    width = (size + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for _, mask in levels]), np.uint8)
    within = np.unpackbits(raw.reshape(len(levels), width), axis=1, count=size, bitorder="little")
    found = np.zeros(size + 1)
    found[:size] = np.array([0, *(depth for depth, _ in levels)], np.float64)[within.sum(axis=0, dtype=np.uint8)]
    return found

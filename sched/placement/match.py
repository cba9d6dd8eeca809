"""How much of a prompt each node holds, as far as the digests tell.

A node that holds a block of a chain holds those before it too (chains are evicted leaf first), so a few keys of a long
chain say nearly as much as all of them: with ANCHORS keys the depth is known to a 12th of the prompt, never too deep.
Nodes that are asked answer with the exact depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sched.gossip.holders import Holders, Key
from sched.placement.links import Vector

ANCHORS = 12

KEPT_ANSWERS = 256
"""Answers kept: prompts that share a prefix find the same nodes at the same depths."""


Places = npt.NDArray[np.intp]


class Matcher:
    """Depths by the digests that `holders()` has."""

    def __init__(self, holders: Callable[[], Holders]) -> None:
        self._holders = holders
        self._places: Places | None = None  # of which the kept answers are
        self._kept: dict[tuple[object, ...], Vector] = {}

    def depths(self, keys: Sequence[Key], block_size: int, places: Places) -> Vector | None:
        """Leading tokens of the prompt that each of these nodes holds, in their order: `places` are the holders'
        indices, -1 = it has none; other nodes are another array. None when nobody holds any. Not to be changed."""
        stride = max(1, -(-len(keys) // ANCHORS))
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
    """From (depth, mask of the nodes at least so deep), ascending, to a depth per node, and one 0. Every mask is within
    the one before it, so in how many a node is says which was its last."""
    width = (size + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for _, mask in levels]), np.uint8)
    within = np.unpackbits(raw.reshape(len(levels), width), axis=1, count=size, bitorder="little")
    found = np.zeros(size + 1)
    found[:size] = np.array([0, *(depth for depth, _ in levels)], np.float64)[within.sum(axis=0, dtype=np.uint8)]
    return found

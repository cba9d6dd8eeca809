"""The arena and the DRAM tier as one pool: a table of blocks may name blocks of both.

A kernel that finds block b at `address of the pool + b * stride` finds every block of the process so, if the stride
divides its distance from the pool. The stride of a block need not; the greatest common divisor of both does:

    unit = gcd(stride of a block, tier - arena)
    block b of the arena  ->  b * stride / unit             slot s  ->  (s * stride + tier - arena) / unit

Then a step over cold blocks in DRAM is an ordinary step: one call for all layers, and no parts to merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int32]]


class OneSpace:
    """`pool`: what a kernel takes for the arena [1, num_layers, planes, num_kv_heads, block_size, head_size]. Only
    kernels that compute addresses themselves may follow its block ids."""

    def __init__(self, arena: Tensor, tier: Tensor) -> None:
        """arena [num_blocks, num_layers, planes, num_kv_heads, block_size, head_size]; tier [slots * num_layers, the
        same], contiguous, of the same dtype. Raises ValueError if an id does not fit in 32 bits."""
        stride, each = arena.stride(0), arena.element_size()
        distance, rest = divmod(tier.data_ptr() - arena.data_ptr(), each)
        if rest or tier.dtype != arena.dtype or tier.stride(0) * arena.shape[1] != stride:
            raise ValueError("the blocks of the arena and of the tier differ")
        unit = math.gcd(stride, distance)
        self._step, self._first = stride // unit, distance // unit
        last = len(tier) // arena.shape[1] * self._step
        most = max(len(arena) * self._step, abs(self._first), abs(self._first + last))
        if most > np.iinfo(np.int32).max:
            raise ValueError(f"{most} is too far for a block id")
        self.pool = torch.as_strided(arena, (1, *arena.shape[1:]), (unit, *arena.stride()[1:]))

    def ids(self, slots: Sequence[int], blocks: Sequence[int]) -> Ids:
        """Of the slots of the tier, then of the blocks of the arena."""
        near, own = np.array(slots, np.int64) * self._step + self._first, np.array(blocks, np.int64) * self._step
        return np.concatenate((near, own)).astype(np.int32)

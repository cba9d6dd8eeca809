"""Where the elements of a state lie in the pool, and the rows of tokens that both kernels read."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.states import StateSlots


@triton.jit
def places(
    memory: tl.tensor,  # [num_blocks, block] float32
    blocks: tl.tensor,  # [groups] int64: of one request
    pieces: tl.tensor,  # [PIECES, 3] int64: part, first element, element behind the last
    block: tl.tensor,  # elements
    element: tl.tensor,  # of the state
    PIECES: tl.constexpr,
) -> tl.tensor:
    """The address of each element; that of the pool for those behind the last one, which must be masked."""
    at = tl.zeros(element.shape, tl.int64)
    done = tl.full((), 0, tl.int64)
    for piece in tl.static_range(PIECES):
        first = tl.load(pieces + 3 * piece + 1)
        size = tl.load(pieces + 3 * piece + 2) - first
        begin = tl.load(blocks + tl.load(pieces + 3 * piece)) * block + first
        at = tl.where((element >= done) & (element < done + size), begin + element - done, at)
        done += size
    return memory + at


@triton.jit
def unit(x: tl.tensor, EPS: tl.constexpr) -> tl.tensor:
    """Rows [.., K] of q or k, divided by their length."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@lru_cache(maxsize=256)
def pieces_of(slots: StateSlots, device: torch.device) -> Tensor:
    """[PIECES, 3] int64."""
    return torch.tensor(slots.pieces, device=device)


def width_of(key_size: int, value_size: int) -> tuple[int, int]:
    """(key_size as a power of two, columns of the state that a program has): up to 4,096 elements, 32 for each of 128
    threads."""
    keys = max(16, triton.next_power_of_2(key_size))
    return keys, max(16, min(4096 // keys, triton.next_power_of_2(value_size)))

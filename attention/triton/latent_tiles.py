"""The tiles of the latent kernels, and the constants that they are compiled for. attention/triton/tiles.py says why the
tiles are a table; tests/attention/triton/test_latent_aot.py compiles its rows.

The accumulator, [rows, rank] float32, stays in registers: 16 rows of 512 take 64 registers of each of 128 threads. With
more rows per program a latent row is read less often from the second-level cache, but the sum of 64 rows already takes
half of a multiprocessor's registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention.triton.geometry import CODES
from attention.triton.tiles import SM80, SM86, SM90, Tile, Tiles

MAX_RANK = 512

TABLE: dict[tuple[int, int], Tiles] = {
    # (bytes per element, minimum shared memory)
    (2, SM90): Tiles(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2)),
    (2, SM80): Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (2, SM86): Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    (4, SM86): Tiles(Tile(16, 16, 8, 1, precision="ieee"), Tile(16, 16, 8, 1, precision="ieee")),
}

OVER_CODES: dict[tuple[int, int], Tiles] = {
    (2, SM90): replace(TABLE[2, SM90], prefill=Tile(32, 16, 8, 2)),
    (2, SM80): replace(TABLE[2, SM80], prefill=Tile(32, 16, 8, 2)),
}
"""Rows for quantized pools: widening the codes takes registers."""


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """The constants that a latent kernel is compiled for."""

    num_heads: int
    rank: int
    rope: int
    block_size: int
    dtype: torch.dtype  # of the queries, and of the products
    codes: int  # a value of geometry.CODES; 0 = the pool has floats

    @classmethod
    def of(cls, q: Tensor, kv: Tensor, rank: int) -> LatentGeometry:
        """From q [T, num_heads, row] and kv [num_blocks, 1, 1, block_size, row]. Raises ValueError on a layout that the
        kernels cannot read."""
        row = q.shape[2]
        if kv.shape[1:3] != (1, 1) or kv.shape[4] != row or not 0 < rank < row:
            raise ValueError(f"q {tuple(q.shape)} with values of {rank} does not fit kv {tuple(kv.shape)}")
        if rank % 16 or (row - rank) % 16 or rank > MAX_RANK:
            raise ValueError(
                f"no tile for a latent of {rank} + {row - rank} in attention/triton/latent_tiles.py; "
                "use --attention-backend torch"
            )
        if q.stride(2) != 1 or kv.stride()[3:] != (row, 1):
            raise ValueError("the last axis of q and each layer's part of a block must be contiguous")
        return cls(q.shape[1], rank, row - rank, kv.shape[3], q.dtype, CODES.get(kv.dtype, 0))

    def rows(self, limit: int) -> int:
        """Query rows of a program for one token: its heads, padded to the minimum of a tensor core, at most `limit`."""
        return min(max(16, 1 << (self.num_heads - 1).bit_length()), limit)

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that decode and prefill have in common."""
        return {
            "NUM_HEADS": self.num_heads,
            "RANK": self.rank,
            "ROPE": self.rope,
            "R": 1 << (self.rank - 1).bit_length(),
            "P": 1 << (self.rope - 1).bit_length(),
            "BLOCK_SIZE": self.block_size,
            "CODES": self.codes,
        }


def find_latent_tiles(element_bytes: int, shared_bytes: int, quantized: bool = False) -> Tiles:
    """The row with the most shared memory that the device has. element_bytes: of the queries; quantized: whether the
    pool is. Raises ValueError."""
    fits = [key for key in TABLE if key[0] == element_bytes and key[1] <= shared_bytes]
    if not fits:
        raise ValueError(
            f"no tile for a latent in {element_bytes} bytes per element and {shared_bytes} bytes of shared memory in "
            "attention/triton/latent_tiles.py; use --attention-backend torch"
        )
    row = max(fits, key=lambda key: key[1])
    return OVER_CODES.get(row, TABLE[row]) if quantized else TABLE[row]

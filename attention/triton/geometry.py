"""The constants that a kernel is compiled for, and the layout of heads in a layer's part of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.codes import SCALE_BYTES, is_quantized

CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Element types of quantized pools -> their numbers in attention/triton/codes.py."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The constants that an attention kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype  # of the queries, and of the products
    head_stride: int  # elements from one KV head to the next in a block
    codes: int  # a value of CODES; 0 = the pool has floats

    @classmethod
    def of(cls, q: Tensor, kv: Tensor) -> Geometry:
        """From q [T, num_heads, head_size] and kv [num_blocks, 2, num_kv_heads, block_size, head_size].
        Raises ValueError on a layout that the kernels cannot read."""
        _, num_heads, head_size = q.shape
        _, two, num_kv_heads, block_size, kv_head_size = kv.shape
        if two != 2 or kv_head_size != head_size or num_heads % num_kv_heads:
            raise ValueError(f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
        if q.stride(2) != 1 or not is_dense_within_block(kv):
            raise ValueError("the last axis of q and each layer's part of a block must be contiguous")
        return cls(num_heads, num_kv_heads, head_size, block_size, q.dtype, head_stride(kv), CODES.get(kv.dtype, 0))

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded(self) -> int:
        """The head size rounded up to a power of two, as tensors in a kernel must be."""
        return 1 << (self.head_size - 1).bit_length()

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that decode and prefill have in common."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_SIZE": self.head_size,
            "D": self.padded,
            "BLOCK_SIZE": self.block_size,
            "HEAD_STRIDE": self.head_stride,
            "CODES": self.codes,
        }


def head_stride(kv: Tensor) -> int:
    """Elements from one KV head to the next in a block; includes the scales after its codes if the pool is
    quantized."""
    return kv.shape[3] * (kv.shape[4] + (SCALE_BYTES if is_quantized(kv) else 0))


def is_dense_within_block(kv: Tensor) -> bool:
    """Whether one layer's part of a block, [2, num_kv_heads, block_size, head_size], is one contiguous span of heads;
    in a quantized pool with the scales of a head after its codes."""
    head = head_stride(kv)
    wanted = (kv.shape[2] * head, head, kv.shape[4], 1)
    return all(kv.shape[i] <= 1 or kv.stride(i) == stride for i, stride in enumerate(wanted, 1))

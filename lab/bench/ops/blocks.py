"""Calls that only read scattered blocks of a paged pool: the limit of attention that reads each block once.

Blocks lie in any order, and at the start of each the hardware's prefetchers start again. So this limit is below that of
reading in order, whichever kernel reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attention.cpu import build
from attention.cpu.level import LEVELS

WAYS = ("read_blocks", "read_blocks_ahead", "read_four_blocks")
"""Functions of blocks.cpp: one block after the other, with or without prefetches, or four at a time. The fastest is the
limit."""


def span_bytes(kv: Tensor) -> int:
    """The bytes of one layer's part of a block, with its scales. kv as in `BlockReader.call`."""
    return kv.shape[1] * kv.stride(1) * kv.element_size()


class BlockReader:
    """Reads blocks with the instructions of a level. Raises NotCompiled."""

    def __init__(self, level: str) -> None:
        self._library = build.load("blocks", [Path(__file__).with_name("blocks.cpp")], LEVELS[level])
        for way in WAYS:
            function = getattr(self._library, way)
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
            function.restype = ctypes.c_uint64

    def call(self, way: str, kv: Tensor, blocks: Tensor, threads: int) -> Callable[[], int]:
        """A call that reads the bytes of kv[i] for each i of `blocks`, in that order, and returns the XOR of their
        64-bit words. kv: [num_blocks, 2, num_kv_heads, block_size, head_size], one layer of a pool, with the scales of
        codes between its parts. blocks: integers of any shape. Raises ValueError unless a block has a multiple of 64
        bytes."""
        nbytes = span_bytes(kv)
        if nbytes % 64:
            raise ValueError(f"blocks of {nbytes} bytes cannot be read in lines of 64")
        addresses = kv.data_ptr() + blocks.flatten().to(torch.int64) * (kv.stride(0) * kv.element_size())
        function, count = getattr(self._library, way), len(addresses)

        def read() -> int:
            return int(function(addresses.data_ptr(), count, nbytes, threads))

        return read

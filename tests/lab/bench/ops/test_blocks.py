"""The limit of scattered blocks: what the calls read is every byte of the blocks that they name, and nothing else."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
import torch

from attention.codes import pool_in
from attention.cpu.level import levels_here
from cache.block import BlockGeometry
from lab.bench.ops.blocks import WAYS, BlockReader, span_bytes

pytestmark = pytest.mark.skipif(not levels_here(), reason="needs x86 with AVX2, or aarch64")


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_reads_all_bytes_of_the_blocks_that_it_names(way, kind, threads):
    geometry = BlockGeometry(3, 2, 64, 16, kind)
    memory = torch.randint(0, 256, (20 * geometry.block_bytes,), dtype=torch.uint8)
    kv = pool_in(memory, geometry.shape, geometry.dtype)[:, 1]
    assert span_bytes(kv) * 3 == geometry.block_bytes
    tables = torch.tensor([[7, 2, 19], [0, 11, 3]], dtype=torch.int32)
    parts = memory.view(20, 3, -1)[:, 1]
    words = parts[tables.flatten().long()].contiguous().view(torch.int64).flatten()
    wanted = reduce(xor, (word & (1 << 64) - 1 for word in words.tolist()))
    assert BlockReader(levels_here()[-1]).call(way, kv, tables, threads)() == wanted


def test_blocks_that_are_no_whole_lines_are_refused():
    with pytest.raises(ValueError, match="72 bytes"):
        BlockReader(levels_here()[-1]).call(WAYS[0], torch.zeros(4, 2, 1, 3, 3), torch.tensor([0]), 1)

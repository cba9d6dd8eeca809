"""Blocks of an arena whose form is not the pool's: there and back, whole and by layers."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import torch

from attention.codes import pool_in
from cache.block import BlockGeometry
from cache.keys import WideKey, extend_wide, pooled_keys
from cache.pool.policy import PLAIN
from engine.node.engine import pool_blocks
from engine.pooled.unlike_blocks import UnlikeBlocks
from engine.unlike.rows import copy_rows
from net.transfer.common.memory import Region
from tests.engine.pooled.test_pool_blocks import DictStore

BLOCKS = 12
SMALL = [bytes([i]) * 16 for i in range(64)]


class PinningStore(DictStore):
    """With reads by layer."""

    @asynccontextmanager
    async def pinned(self, keys):
        yield Pinned(self, keys) if all(key in self.values for key in keys) else None

    async def exists_many(self, keys):
        return [key in self.values for key in keys]


class Pinned:
    def __init__(self, store, keys):
        self.store, self.keys = store, keys

    async def read_parts(self, region, places, parts, landed):
        for index, (start, length) in enumerate(parts):
            for key, at in zip(self.keys, places(index), strict=True):
                region.memory[at : at + length] = self.store.values[key][start : start + length]
            await landed(index)
        return True


class Side:
    def __init__(self, store, own: BlockGeometry, pooled: BlockGeometry, staging_bytes: int = 1 << 20) -> None:
        self.arena = Region.shared("kv", BLOCKS * own.block_bytes)
        self.kv = pool_in(torch.frombuffer(self.arena.memory, dtype=torch.uint8), own.shape, own.dtype)
        self.blocks = pool_blocks(store, self.arena, own, staging_bytes, pooled)
        assert isinstance(self.blocks, UnlikeBlocks)
        self.keys = extend_wide([], SMALL, own.block_size // pooled.block_size)

    def close(self) -> None:
        self.blocks.close()
        del self.kv
        self.arena.close()


FORMS = [
    ("float32", 64, "float32", 16, ""),
    ("int8", 64, "int8", 16, ""),
    ("bfloat16", 16, "float32", 16, ""),
    ("float32", 16, "int8", 16, ""),
    ("int8", 32, "float32", 16, ""),
    ("fp8", 16, "bfloat16", 16, ""),
    ("int8", 32, "float32", 16, "int8"),
    ("bfloat16", 32, "float32", 16, "fp8"),
    ("float32", 32, "float32", 16, "int4"),
]


@pytest.mark.parametrize(("dtype", "size", "pool_dtype", "each", "encoding"), FORMS)
async def test_blocks_come_back_whole_and_by_layers(dtype, size, pool_dtype, each, encoding):
    own = BlockGeometry(4, 2, 8, size, dtype, encoding)
    pooled = BlockGeometry(4, 2, 8, each, pool_dtype, encoding)
    store = PinningStore(pooled.pool_bytes)
    side = Side(store, own, pooled)
    torch.manual_seed(1)
    copy_rows(torch.randn(5, *own.shape), 0, side.kv[:5], 0, size)
    keys, part = side.keys[:5], size // each
    assert await side.blocks.put(keys, range(5), [PLAIN] * 5) == 5 * part
    assert list(store.values) == SMALL[: 5 * part] == pooled_keys(keys)
    assert {len(value) for value in store.values.values()} == {pooled.pool_bytes}
    assert await side.blocks.exists(side.keys[:6]) == [True] * 5 + [False]
    del store.values[SMALL[5 * part - 1]]
    result = await side.blocks.get(keys, range(6, 11))
    assert result.blocks == 4
    before, after = (wide(side.kv[first : first + 4], own) for first in (0, 6))
    exact = not encoding and (dtype == pool_dtype or (dtype, pool_dtype) == ("bfloat16", "float32"))
    error = (before - after).abs().max()
    assert (error == 0) if exact else error < (0.5 if encoding == "int4" else 0.3)
    landed: list[int] = []
    async with side.blocks.layers(keys[:4], [11, 10, 9, 8]) as found:
        assert found is not None and await found.read(landed.append)
    assert landed == list(range(4))
    assert torch.equal(wide(side.kv[8:12], own).flip(0), after)
    side.close()


def wide(kv: torch.Tensor, own: BlockGeometry) -> torch.Tensor:
    """A copy in float32."""
    out = torch.empty(len(kv), *own.shape)
    copy_rows(kv, 0, out, 0, own.block_size)
    return out


async def test_a_prefix_without_room_for_two_layers_comes_whole_in_windows():
    own, pooled = BlockGeometry(4, 2, 8, 64, "float32"), BlockGeometry(4, 2, 8, 16, "int8")
    store = PinningStore(pooled.pool_bytes)
    side = Side(store, own, pooled, staging_bytes=16 * pooled.pool_bytes)
    torch.manual_seed(2)
    side.kv[:5] = torch.randn(5, *own.shape)
    assert await side.blocks.put(side.keys[:5], range(5), [PLAIN] * 5) == 20
    async with side.blocks.layers(side.keys[:5], range(6, 11)) as found:
        assert found is None
    assert (await side.blocks.get(side.keys[:5], range(6, 11))).blocks == 5
    assert 0 < (side.kv[6:11] - side.kv[:5]).abs().max() < 0.05
    side.close()


def test_a_key_of_a_large_block_is_that_of_its_last_part():
    wide_keys = extend_wide([], SMALL[:7], 3)
    assert wide_keys == [SMALL[2], SMALL[5]] and all(isinstance(key, WideKey) for key in wide_keys)
    first = wide_keys[0]
    assert extend_wide(wide_keys, SMALL[:9], 3) is wide_keys and wide_keys[0] is first
    assert pooled_keys(wide_keys) == SMALL[:9] and pooled_keys(SMALL[:2]) == SMALL[:2]
    assert {SMALL[5]: 1}[wide_keys[1]] == 1

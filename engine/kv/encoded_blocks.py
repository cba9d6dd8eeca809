"""Blocks in one byte per element in the pool and on the wire (--pool-dtype): encoded when they leave the arena, decoded
when they come back. What moves, what a home keeps and what checksums cover are the encoded bytes.

Two staging areas of a few blocks each, one per direction. The conversion runs in one thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from attention.codes import DTYPES
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry, BlockKey
from cache.policy import Facts
from cache.results import GetResult
from cache.store import Store
from engine.kv.prefetch import total
from net.memory import Region

STAGING_BYTES = 16 << 20


class EncodedBlocks:
    """`arena`: the engine's, on the CPU. Registers its staging areas with `store`."""

    def __init__(self, store: Store, arena: Region, geometry: BlockGeometry) -> None:
        self._store = store
        self._dtype = DTYPES[geometry.pool_dtype]
        self._nbytes = geometry.pool_bytes
        self._window = max(1, STAGING_BYTES // self._nbytes)
        self._blocks = torch.frombuffer(arena.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        self._out, self._in = (Region.shared(name, self._window * self._nbytes) for name in ("kv-out", "kv-in"))
        self._codes_out, self._codes_in = self._codes(self._out), self._codes(self._in)
        self._offsets = [slot * self._nbytes for slot in range(self._window)]
        self._putting, self._getting = asyncio.Lock(), asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-codec")
        store.attach(self._out)
        store.attach(self._in)

    def _codes(self, region: Region) -> Tensor:
        """[window, encoded bytes] uint8"""
        return torch.frombuffer(region.memory, dtype=torch.uint8).view(self._window, -1)

    async def put(self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts]) -> int:
        stored = 0
        async with self._putting:
            for first in range(0, len(keys), self._window):
                part = slice(first, first + self._window)
                await self._convert(self._encode, block_ids[part])
                offsets = self._offsets[: len(keys[part])]
                stored += await self._store.put_from(keys[part], self._out.name, offsets, facts[part])
        return stored

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._store.exists_many(keys)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        parts = []
        for first in range(0, len(keys), self._window):
            part = slice(first, first + self._window)
            async with self._getting:  # between windows others have their turn
                wanted = len(keys[part])
                result = await self._store.get_into(keys[part], self._in.name, self._offsets[:wanted])
                await self._convert(self._decode, block_ids[part][: result.blocks])
            parts.append(result)
            if result.blocks < wanted:
                break
        return total(parts)

    async def _convert(self, work: Callable[[Sequence[int]], None], block_ids: Sequence[int]) -> None:
        """Ends when the thread is done with the memory, even when this is cancelled."""
        task = asyncio.get_running_loop().run_in_executor(self._executor, work, block_ids)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def _encode(self, block_ids: Sequence[int]) -> None:
        for slot, block_id in enumerate(block_ids):
            encode_block(self._blocks[block_id], self._dtype, self._codes_out[slot])

    def _decode(self, block_ids: Sequence[int]) -> None:
        for slot, block_id in enumerate(block_ids):
            decode_block(self._codes_in[slot], self._dtype, self._blocks[block_id])

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        del self._blocks, self._codes_out, self._codes_in  # they keep the memory mapped
        self._out.close()
        self._in.close()

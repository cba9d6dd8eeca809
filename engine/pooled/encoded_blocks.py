"""Pooled blocks in a smaller type (--pool-dtype): encoded when they leave the arena, decoded when they return.
What moves, what a home keeps and what checksums cover are the encoded bytes.

Two staging areas, one per direction. A prefix that comes layer by layer needs room there for two layers of each block:
one is decoded while the next arrives. The conversion runs in one thread of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import torch
from torch import Tensor

from attention.codes import POOL_DTYPES
from attention.quantize_torch import chunks, decode_block, decode_layers, encode_block
from cache.block import BlockGeometry, BlockKey
from cache.pool.policy import Facts
from cache.results import GetResult
from cache.staging import Staging
from cache.store.store import Store
from engine.pooled.conversion import Conversion
from engine.pooled.pool_blocks import LayerRead
from engine.pooled.prefetch import total
from net.transfer.common.memory import Region


class EncodedBlocks:
    """`arena`: the engine's, on the CPU. Registers its staging areas, `staging_bytes` each, with `store`."""

    def __init__(self, store: Store, arena: Region, geometry: BlockGeometry, staging_bytes: int) -> None:
        self._store = store
        self._geometry = geometry
        self._dtype = POOL_DTYPES[geometry.pool_dtype]
        self._blocks = torch.frombuffer(arena.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        self._out, self._in = (Staging(geometry.pool_bytes, staging_bytes, name) for name in ("kv-out", "kv-in"))
        self._codes_out, self._codes_in = (self._codes(staging) for staging in (self._out, self._in))
        self._window = self._in.num_slots // 2  # so that two calls have room
        self._conversion = Conversion("kv-codec")
        store.attach(self._out.region())
        store.attach(self._in.region())

    def _codes(self, staging: Staging) -> Tensor:
        """[layers that have room, encoded bytes of a layer] uint8"""
        codes = torch.frombuffer(staging.region().memory, dtype=torch.uint8)
        return codes.view(-1, self._geometry.pool_layer_bytes)

    async def put(self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts]) -> int:
        stored = 0
        for first in range(0, len(keys), self._window):
            part = slice(first, first + self._window)
            async with self._out.slots(len(keys[part])) as offsets:
                await self._conversion.run(partial(self._encode, block_ids[part], offsets))
                stored += await self._store.put_from(keys[part], self._out.region().name, offsets, facts[part])
        return stored

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._store.exists_many(keys)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        parts = []
        for first in range(0, len(keys), self._window):
            part = slice(first, first + self._window)
            wanted = len(keys[part])
            async with self._in.slots(wanted) as offsets:  # other requests get their turn between windows
                result = await self._store.get_into(keys[part], self._in.region().name, offsets)
                await self._conversion.run(partial(self._decode, block_ids[part][: result.blocks], offsets))
            parts.append(result)
            if result.blocks < wanted:
                break
        return total(parts)

    @asynccontextmanager
    async def layers(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> AsyncIterator[LayerRead | None]:
        """The same as PlainBlocks.layers. Also yields None if the blocks need more than half of the staging area."""
        geometry = self._geometry
        nbytes, count = geometry.pool_layer_bytes, len(keys)
        num_slots = -(-2 * count // geometry.num_layers)
        if num_slots > self._window:
            yield None
            return
        async with self._in.slots(num_slots) as slots, self._store.pinned(keys) as pinned:
            if pinned is None:
                yield None
                return
            rooms = [slot + layer * nbytes for slot in slots for layer in range(geometry.num_layers)]
            areas = rooms[:count], rooms[count : 2 * count]

            async def read(landed: Callable[[int], None]) -> bool:
                async def decode(layer: int) -> None:
                    await self._conversion.run(partial(self._decode_layer, layer, block_ids, areas[layer % 2]))
                    landed(layer)

                parts = [(layer * nbytes, nbytes) for layer in range(geometry.num_layers)]
                return await pinned.read_parts(self._in.region(), lambda layer: areas[layer % 2], parts, decode)

            yield LayerRead(pinned, read)

    def _encode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        for block_id, offset in zip(block_ids, offsets, strict=True):
            encode_block(self._blocks[block_id], self._dtype, self._of_block(self._codes_out, offset))

    def _decode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        for block_id, offset in zip(block_ids, offsets, strict=False):
            decode_block(self._of_block(self._codes_in, offset), self._dtype, self._blocks[block_id])

    def _of_block(self, codes: Tensor, offset: int) -> Tensor:
        """[encoded bytes of a block]"""
        first = offset // self._geometry.pool_layer_bytes
        return codes[first : first + self._geometry.num_layers].view(-1)

    def _decode_layer(self, layer: int, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        """Of each block, from offsets[i] of the staging area."""
        ids = torch.tensor(block_ids)
        rows = torch.tensor(offsets) // self._geometry.pool_layer_bytes
        shape = self._geometry.shape[1:]
        for part in chunks(len(ids), shape):
            values = decode_layers(self._codes_in[rows[part]], self._dtype, shape)
            self._blocks[ids[part], layer] = values.to(self._blocks.dtype)

    def close(self) -> None:
        self._conversion.close()
        del self._blocks, self._codes_out, self._codes_in  # they keep the memory mapped
        self._out.close()
        self._in.close()

"""Pooled blocks in a smaller type (--pool-dtype): encoded when they leave the arena, decoded when they return.
What moves, what a home keeps and what checksums cover are the encoded bytes.

Two staging areas, one per direction. A prefix that comes layer by layer needs room there for two layers of each block:
one is decoded while the next arrives. The conversion runs in one thread of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention.codes import POOL_DTYPES
from attention.quantize_torch import chunks, decode_block, decode_layers, encode_block
from cache.block import BlockGeometry, BlockKey
from cache.keys import pooled_keys
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

    _each = 1  # blocks of the pool in one of the arena

    def __init__(self, store: Store, arena: Region, geometry: BlockGeometry, staging_bytes: int) -> None:
        self._open(store, geometry.num_layers, geometry.pool_layer_bytes, staging_bytes)
        self._geometry = geometry
        self._dtype = POOL_DTYPES[geometry.pool_dtype]
        self._blocks = torch.frombuffer(arena.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)

    def _open(self, store: Store, num_layers: int, layer_bytes: int, staging_bytes: int) -> None:
        """layer_bytes: of one layer of a block in the pool."""
        self._store, self._num_layers, self._layer_bytes = store, num_layers, layer_bytes
        size = num_layers * layer_bytes
        self._out, self._in = (Staging(size, staging_bytes, name) for name in ("kv-out", "kv-in"))
        self._codes_out, self._codes_in = (self._codes(staging) for staging in (self._out, self._in))
        self._window = self._in.num_slots // 2  # so that two calls have room
        self._conversion = Conversion("kv-codec")
        store.attach(self._out.region())
        store.attach(self._in.region())

    def _codes(self, staging: Staging) -> Tensor:
        """[layers that have room, bytes of a layer] uint8"""
        codes = torch.frombuffer(staging.region().memory, dtype=torch.uint8)
        return codes.view(-1, self._layer_bytes)

    async def put(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float = 0.0
    ) -> int:
        stored, step = 0, self._window // self._each
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            named = pooled_keys(keys[part])
            async with self._out.slots(len(named)) as offsets:
                await self._conversion.run(partial(self._encode, block_ids[part], offsets))
                all_facts = [one for one in facts[part] for _ in range(self._each)]
                stored += await self._store.put_from(named, self._out.region().name, offsets, all_facts, ttl_s=ttl_s)
        return stored

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = await self._store.exists_many(pooled_keys(keys))
        return [all(found[first : first + self._each]) for first in range(0, len(found), self._each)]

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        parts, step = [], self._window // self._each
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            named = pooled_keys(keys[part])
            async with self._in.slots(len(named)) as offsets:  # other requests get their turn between windows
                result = await self._store.get_into(named, self._in.region().name, offsets, site)
                whole = result.blocks // self._each
                await self._conversion.run(partial(self._decode, block_ids[part][:whole], offsets))
            parts.append(result if self._each == 1 else self._in_own_blocks(result, whole))
            if result.blocks < len(named):
                break
        return total(parts)

    def _in_own_blocks(self, result: GetResult, whole: int) -> GetResult:
        """`sources` and `tiers` still count blocks of the pool."""
        transports = {name: -(-count // self._each) for name, count in result.transports.items()}
        return replace(result, blocks=whole, transports=transports)

    @asynccontextmanager
    async def layers(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> AsyncIterator[LayerRead | None]:
        """The same as PlainBlocks.layers. Also yields None if the blocks need more than half of the staging area."""
        named, nbytes = pooled_keys(keys), self._layer_bytes
        count = len(named)
        num_slots = -(-2 * count // self._num_layers)
        if num_slots > self._window:
            yield None
            return
        async with self._in.slots(num_slots) as slots, self._store.pinned(named) as pinned:
            if pinned is None:
                yield None
                return
            rooms = [slot + layer * nbytes for slot in slots for layer in range(self._num_layers)]
            areas = rooms[:count], rooms[count : 2 * count]

            async def read(landed: Callable[[int], None]) -> bool:
                async def decode(layer: int) -> None:
                    await self._conversion.run(partial(self._decode_layer, layer, block_ids, areas[layer % 2]))
                    landed(layer)

                parts = [(layer * nbytes, nbytes) for layer in range(self._num_layers)]
                return await pinned.read_parts(self._in.region(), lambda layer: areas[layer % 2], parts, decode)

            yield LayerRead(pinned, read)

    def _encode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        for block_id, offset in zip(block_ids, offsets, strict=True):
            encode_block(self._blocks[block_id], self._dtype, self._of_block(self._codes_out, offset).view(-1))

    def _decode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        for block_id, offset in zip(block_ids, offsets, strict=False):
            decode_block(self._of_block(self._codes_in, offset).view(-1), self._dtype, self._blocks[block_id])

    def _of_block(self, codes: Tensor, offset: int) -> Tensor:
        """[num_layers, bytes of a layer]"""
        first = offset // self._layer_bytes
        return codes[first : first + self._num_layers]

    def _decode_layer(self, layer: int, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        """Of each block, from offsets[i] of the staging area."""
        ids = torch.tensor(block_ids)
        rows = torch.tensor(offsets) // self._layer_bytes
        shape = self._geometry.shape[1:]
        for part in chunks(len(ids), shape):
            values = decode_layers(self._codes_in[rows[part]], self._dtype, shape)
            self._blocks[ids[part], layer] = values.to(self._blocks.dtype)

    def _let_go(self) -> None:
        """Of the arena's memory."""
        del self._blocks

    def close(self) -> None:
        self._conversion.close()
        self._let_go()
        del self._codes_out, self._codes_in  # they keep the memory mapped
        self._out.close()
        self._in.close()

"""Pooled blocks of which each is exact, or in four bits where that pays (--pool-dtype int4-auto; rounding.py).

An exact block moves straight from and to the arena. A rounded one is shorter than its slot at the home, and its length
is its form. It arrives at the beginning of its block in the arena, and is decoded there. Prefixes come layer by layer
only if all of their blocks are exact.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from attention.codes import POOL_DTYPES
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry, BlockKey
from cache.pool.policy import Facts
from cache.results import GetResult
from cache.staging import Staging
from cache.store.store import Store
from engine.pooled.conversion import Conversion
from engine.pooled.pool_blocks import LayerRead, PlainBlocks
from net.transfer.common.memory import Region

INT4 = POOL_DTYPES["int4"]
TRIALS = 3

T = TypeVar("T")


class ChosenBlocks(PlainBlocks):
    """`arena`: the engine's, on the CPU. Registers its staging area, of `staging_bytes`, with `store`."""

    def __init__(
        self,
        store: Store,
        arena: Region,
        geometry: BlockGeometry,
        staging_bytes: int,
        pays: Callable[[BlockKey], bool],
    ) -> None:
        """pays: whether a block should be rounded (Rounding.pays)."""
        super().__init__(store, arena.name, geometry)
        self._pays = pays
        self._short = geometry.int4_bytes
        self._out = Staging(geometry.block_bytes, staging_bytes, "kv-out")  # a put names whole slots
        store.attach(self._out.region())
        self._codes = torch.frombuffer(self._out.region().memory, dtype=torch.uint8)
        self._bytes = torch.frombuffer(arena.memory, dtype=torch.uint8).view(-1, geometry.block_bytes)
        self._blocks = self._bytes.view(getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        self._conversion = Conversion("kv-codec")
        self.put_blocks = {"exact": 0, "int4": 0}  # that were new in the pool
        self.got_blocks = {"exact": 0, "int4": 0}

    async def put(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float = 0.0
    ) -> int:
        exact: list[int] = []
        short: list[int] = []
        for at, key in enumerate(keys):
            (short if self._pays(key) else exact).append(at)
        stored = 0
        if exact:
            stored = await super().put(_some(keys, exact), _some(block_ids, exact), _some(facts, exact), ttl_s)
            self.put_blocks["exact"] += stored
        for first in range(0, len(short), self._out.num_slots):
            part = short[first : first + self._out.num_slots]
            new = await self._put_short(_some(keys, part), _some(block_ids, part), _some(facts, part), ttl_s)
            self.put_blocks["int4"] += new
            stored += new
        return stored

    async def _put_short(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float
    ) -> int:
        async with self._out.slots(len(keys)) as offsets:
            await self._conversion.run(partial(self._encode, block_ids, offsets))
            region = self._out.region().name
            return await self._store.put_from(keys, region, offsets, facts, nbytes=self._short, ttl_s=ttl_s)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        result = await super().get(keys, block_ids, site)
        short = [at for at in range(result.blocks) if at in result.lengths]
        wrong = min((at for at in short if result.lengths[at] != self._short), default=result.blocks)
        if wrong < result.blocks:  # of neither form: a miss
            result, short = replace(result, blocks=wrong), [at for at in short if at < wrong]
        if short:
            await self._conversion.run(partial(self._decode, _some(block_ids, short)))
        self.got_blocks["int4"] += len(short)
        self.got_blocks["exact"] += result.blocks - len(short)
        return replace(result, saved_bytes=len(short) * (self._block_bytes - self._short))

    @asynccontextmanager
    async def layers(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> AsyncIterator[LayerRead | None]:
        async with super().layers(keys, block_ids) as found:
            if found is None or not found.pinned.fill_slots:
                yield None
                return

            async def read(landed: Callable[[int], None]) -> bool:
                whole = await found.read(landed)
                self.got_blocks["exact"] += whole * len(keys)
                return whole

            yield LayerRead(found.pinned, read)

    def _encode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        for block_id, offset in zip(block_ids, offsets, strict=True):
            encode_block(self._blocks[block_id], INT4, self._codes[offset : offset + self._short])

    def _decode(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            decode_block(self._bytes[block_id, : self._short].clone(), INT4, self._blocks[block_id])

    def state(self) -> dict[str, dict[str, int]]:
        """For /debug/state."""
        return {"put": dict(self.put_blocks), "got": dict(self.got_blocks)}

    def close(self) -> None:
        self._conversion.close()
        del self._blocks, self._bytes, self._codes  # they keep the memory mapped
        self._out.close()


def _some(of: Sequence[T], places: Sequence[int]) -> list[T]:
    return [of[at] for at in places]


def decode_rate(geometry: BlockGeometry) -> float:
    """Bytes of exact KV per second of processor time in which this thread decodes blocks in four bits: the best of
    TRIALS. By the clock, one busy moment of the machine would decide for the life of the node."""
    block = torch.zeros(geometry.shape, dtype=getattr(torch, geometry.dtype))
    codes = torch.empty(geometry.int4_bytes, dtype=torch.uint8)
    encode_block(block, INT4, codes)
    best = float("inf")
    for _ in range(TRIALS):
        began = time.thread_time()
        decode_block(codes, INT4, block)
        best = min(best, time.thread_time() - began)
    return geometry.block_bytes / best

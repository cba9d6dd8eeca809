"""Blocks of the engine's KV arena on their way to and from the pooled store, unchanged. encoded_blocks.py encodes
them instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from cache.block import BlockGeometry, BlockKey
from cache.pool.policy import Facts
from cache.results import GetResult
from cache.store.layered import PinnedBlocks
from cache.store.store import Store


class PoolBlocks(Protocol):
    """The caller holds the blocks until a call is over."""

    async def put(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float = 0.0
    ) -> int:
        """Publish blocks of the arena; returns how many the pool did not have. ttl_s: see Store.put_from."""

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        """Fetch the leading run of `keys` that can be had into the arena; bytes are those that moved. `site`: from
        the pool of that other site."""

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the pool has each of them now."""

    def close(self) -> None:
        """Give memory back. No call is under way."""


@dataclass(frozen=True, slots=True)
class LayerRead:
    """Blocks that are kept at their homes, to be read into the arena layer by layer. `read(landed)` calls landed(l)
    when layer l of all of them is in the arena, in the order of the layers, and returns whether they are what was
    stored; nothing is written to the arena any more when it returns or is cancelled."""

    pinned: PinnedBlocks
    read: Callable[[Callable[[int], None]], Awaitable[bool]]


Layers = Callable[[Sequence[BlockKey], Sequence[int]], AbstractAsyncContextManager[LayerRead | None]]
"""layers(keys, block ids): open, it keeps the blocks at their homes. None: they cannot be had layer by layer."""


class PlainBlocks:
    """A block lies in the pool as it lies in `region`, so the bytes go straight from and to the arena."""

    def __init__(self, store: Store, region: str, geometry: BlockGeometry) -> None:
        self._store = store
        self._region = region
        self._geometry = geometry
        self._block_bytes = geometry.block_bytes

    async def put(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float = 0.0
    ) -> int:
        return await self._store.put_from(keys, self._region, self._offsets(block_ids), facts, ttl_s=ttl_s)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        return await self._store.get_into(keys, self._region, self._offsets(block_ids), site)

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._store.exists_many(keys)

    @asynccontextmanager
    async def layers(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> AsyncIterator[LayerRead | None]:
        """A Layers."""
        async with self._store.pinned(keys) as pinned:
            if pinned is None:
                yield None
                return
            nbytes, offsets = self._geometry.layer_bytes, self._offsets(block_ids)
            parts = [(layer * nbytes, nbytes) for layer in range(self._geometry.num_layers)]

            async def read(landed: Callable[[int], None]) -> bool:
                return await pinned.read(self._store.region(self._region), offsets, parts, landed)

            yield LayerRead(pinned, read)

    def _offsets(self, block_ids: Sequence[int]) -> list[int]:
        return [block_id * self._block_bytes for block_id in block_ids]

    def close(self) -> None:
        pass

"""How blocks of the engine's KV arena go to the pooled store and come back: as they are here, encoded in
encoded_blocks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache.block import BlockGeometry, BlockKey
from cache.policy import Facts
from cache.results import GetResult
from cache.store import Store


class PoolBlocks(Protocol):
    """The caller holds the blocks until a call is over."""

    async def put(self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts]) -> int:
        """Publish blocks of the arena; returns how many the pool did not have."""

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        """Fetch the leading run of `keys` that can be had into the arena; bytes are those that moved."""

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the pool has each of them now."""

    def close(self) -> None:
        """Give memory back. No call is under way."""


class PlainBlocks:
    """A block lies in the pool as it lies in `region`, so the bytes go straight from and to the arena."""

    def __init__(self, store: Store, region: str, geometry: BlockGeometry) -> None:
        self._store = store
        self._region = region
        self._block_bytes = geometry.block_bytes

    async def put(self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts]) -> int:
        return await self._store.put_from(keys, self._region, self._offsets(block_ids), facts)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        return await self._store.get_into(keys, self._region, self._offsets(block_ids))

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._store.exists_many(keys)

    def _offsets(self, block_ids: Sequence[int]) -> list[int]:
        return [block_id * self._block_bytes for block_id in block_ids]

    def close(self) -> None:
        pass

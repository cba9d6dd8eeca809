"""Scattered: blocks between the pool and memory that callers copy themselves, so that a block may lie in many pieces.

Blocks pass through a staging area. The caller copies its pieces to and from the address of a slot there: nothing joins
them before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from cache.block import BlockKey
from cache.pool.policy import OBJECTS
from cache.staging import Staging
from cache.store.job import StoreCall
from net.transfer.common.memory import Region

REGION = "scattered-staging"
STORED, PRESENT, NO_ROOM, UNREACHABLE, UNPINNED, OVER_QUOTA = range(6)
"""The end of one block of a put. UNPINNED: it is new and stored, but its homes pin no more blocks. OVER_QUOTA: a home
refused it because of its tenant's quota; another one may have stored it."""


class Scatter(NamedTuple):
    """One block of a put."""

    key: BlockKey
    nbytes: int
    fill: Callable[[int], None]  # copies the block to this address


class Scattered:
    """The parameters are those of cache/store/values.py."""

    def __init__(
        self,
        block_bytes: int,
        attach: Callable[[Region], None],
        job: Callable[[Sequence[BlockKey], str, Sequence[int]], StoreCall],
        fetch: Callable[[StoreCall], Awaitable[object]],
        put: Callable[[StoreCall], Awaitable[object]],
    ) -> None:
        self._attach = attach
        self._job = job
        self._fetch = fetch
        self._put = put
        self._staging = Staging(block_bytes, name=REGION)
        self._at_once = max(1, self._staging.num_slots // 2)
        self._staged = False

    async def get_each(self, keys: Sequence[BlockKey], take: Callable[[int, int, int], None]) -> None:
        """take(i, address, bytes) for every present block i; the memory there is valid only during that call."""
        for first in range(0, len(keys), self._at_once):
            batch = keys[first : first + self._at_once]
            async with self._staging.slots(len(batch)) as offsets:
                job = self._job(batch, self._stage(), offsets)
                await self._fetch(job)
                start = job.region.address
                for i in sorted(job.arrived):
                    take(first + i, start + offsets[i], job.length(i))

    async def put_each(
        self, blocks: Sequence[Scatter], *, pin: bool = False, named: bool = False, replicas: int = 0
    ) -> list[int]:
        """The end of each block. `pin`: homes never evict it. `named`: the keys identify their content. `replicas`: so
        many copies, if that is more than the cluster's and there are as many members with room now."""
        ends: list[int] = []
        for first in range(0, len(blocks), self._at_once):
            batch = blocks[first : first + self._at_once]
            async with self._staging.slots(len(batch)) as offsets:
                job = self._job([block.key for block in batch], self._stage(), offsets)
                for i, block in enumerate(batch):
                    block.fill(job.region.address + offsets[i])
                    job.lengths[i] = block.nbytes
                job.facts, job.agree, job.keep, job.replicas = [OBJECTS], not named, pin, replicas
                await self._put(job)
                ends += [_end(job, i) for i in range(len(batch))]
        return ends

    def _stage(self) -> str:
        if not self._staged:
            self._attach(self._staging.region())
            self._staged = True
        return self._staging.region().name

    def close(self) -> None:
        self._staging.close()


def _end(job: StoreCall, position: int) -> int:
    if position in job.over - job.present:
        return OVER_QUOTA
    if position in job.stored:
        return UNPINNED if job.keep and position not in job.pinned else STORED
    if position in job.present:
        return PRESENT
    return NO_ROOM if position in job.refused else UNREACHABLE

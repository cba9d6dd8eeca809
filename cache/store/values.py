"""Values: single values as bytes, for callers without an arena. They pass through a staging area."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from cache.arena import Buffer
from cache.block import BlockKey
from cache.pool.policy import OBJECTS
from cache.results import NoRoom, NotDurable, OverQuota, Unreachable
from cache.staging import Staging
from cache.store.job import StoreCall
from net.transfer.common.memory import Region


class Values:
    """`attach` makes a region known to the store, `job` prepares a call on one, `fetch` and `put` carry jobs out."""

    def __init__(
        self,
        block_bytes: int,
        attach: Callable[[Region], None],
        job: Callable[[Sequence[BlockKey], str, Sequence[int]], StoreCall],
        fetch: Callable[[StoreCall], Awaitable[object]],
        put: Callable[[StoreCall], Awaitable[object]],
    ) -> None:
        self._block_bytes = block_bytes
        self._attach = attach
        self._job = job
        self._fetch = fetch
        self._put = put
        self._staging = Staging(block_bytes)
        self._staged = False

    @property
    def at_once(self) -> int:
        """Values that one batch moves together; longer batches are split."""
        return max(1, self._staging.num_slots // 2)

    async def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Each value or None, in order."""
        out: list[bytes | None] = []
        for first in range(0, len(keys), self.at_once):
            batch = keys[first : first + self.at_once]
            async with self._staging.slots(len(batch)) as offsets:
                job = self._job(batch, self._stage(), offsets)
                await self._fetch(job)
                out += [_value(job, i) if i in job.arrived else None for i in range(len(batch))]
        return out

    async def put_many(
        self,
        items: Sequence[tuple[BlockKey, Buffer]],
        *,
        durable: bool = False,
        pin: bool = False,
        named: bool = False,
    ) -> list[bool]:
        """For each item, whether it is new. `named`: the keys identify their content. Raises ValueError for an
        impossible length, NoRoom, NotDurable, Unreachable."""
        if wrong := [len(value) for _, value in items if not 0 < len(value) <= self._block_bytes]:
            raise ValueError(
                f"a value needs 1 to {self._block_bytes} bytes, not {wrong[0]}: store larger ones under objects/"
            )
        out: list[bool] = []
        for first in range(0, len(items), self.at_once):
            batch = items[first : first + self.at_once]
            async with self._staging.slots(len(batch)) as offsets:
                job = self._job([key for key, _ in batch], self._stage(), offsets)
                job.agree = not named
                for i, (_, value) in enumerate(batch):
                    job.region.memory[offsets[i] : offsets[i] + len(value)] = value
                    job.lengths[i] = len(value)
                job.facts, job.durable, job.keep = [OBJECTS], durable, pin
                await self._put(job)
                all_taken(job)
                all_lasting(job)
                out += [i in job.stored for i in range(len(batch))]
        return out

    def _stage(self) -> str:
        if not self._staged:
            self._attach(self._staging.region())
            self._staged = True
        return self._staging.region().name

    def close(self) -> None:
        self._staging.close()


def _value(job: StoreCall, position: int) -> bytes:
    start = job.offsets[position]
    return bytes(job.region.memory[start : start + job.length(position)])


def all_taken(job: StoreCall) -> None:
    """Raises NoRoom, OverQuota, Unreachable unless every block of a put is in the pool, at all the homes that it
    reached."""
    if over := job.over - job.present:
        raise OverQuota(f"{len(over)} of {len(job.keys)} values exceed the quota of their tenant (--tenants)")
    lost = set(range(len(job.keys))) - job.stored - job.present
    if not lost:
        return
    if lost & job.refused:
        why = _why(job) or "raise --dram-bytes, or the share of objects in --cache-shares"
        raise NoRoom(f"the pool has no room for {len(lost)} of {len(job.keys)} values: {why}")
    raise Unreachable(f"no home answered for {len(lost)} of {len(job.keys)} values")


def all_lasting(job: StoreCall) -> None:
    """Raises NoRoom, NotDurable unless the blocks of a put that are in the pool are pinned and on disk, as far as the
    put requires."""
    there = job.stored | job.present
    if job.keep and (loose := there - job.pinned):
        raise NoRoom(f"{len(loose)} of {len(job.keys)} values are stored, but not pinned: {_why(job) or 'try again'}")
    if job.durable and (unsafe := there - job.on_disk):
        raise NotDurable(f"{len(unsafe)} of {len(job.keys)} values are not safe on SSD: {_why(job) or 'try again'}")


def _why(job: StoreCall) -> str:
    return "; ".join(sorted(job.trouble))

"""Saving: complete blocks from the memory of the engine to the pool.

A layer is copied to staging memory in a thread while the next layer is computed. After the step the blocks go from
there to their homes, while the engine may do with its blocks what it likes: nothing holds them.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cache.block import BlockKey
from cache.pool.policy import Facts
from cache.results import StoreError
from connect.vllm.layout import Layout
from connect.vllm.pool import Pool
from connect.vllm.work import Save
from net.errors import PeerLost, PeerRefused, RemoteError
from net.transfer.common.memory import Region

log = logging.getLogger("mooncake.connect")

REGION = "vllm-staging"
ROOM_S = 5.0
"""A producer waits this long for staging memory: its consumer needs the blocks."""


@dataclass(slots=True)
class _Batch:
    """The blocks that one step saves."""

    keys: list[BlockKey]
    block_ids: list[int]
    positions: list[int]
    slots: list[int]


class Saving:
    """The saves of one worker. `patient`: it waits for staging memory instead of dropping blocks. One thread calls."""

    def __init__(self, pool: Pool, layout: Layout, staging_bytes: int, patient: bool) -> None:
        """Raises OSError when memory is refused."""
        self._pool = pool
        self._layout = layout
        self._patient = patient
        slot_bytes = self._slot_bytes = pool.store.block_bytes
        count = max(1, staging_bytes // slot_bytes)
        self._staging = Region.shared(REGION, count * slot_bytes)
        pool.attach(self._staging)
        self._copier = ThreadPoolExecutor(1, "mooncake-vllm-copy")
        self._batch: _Batch | None = None
        self._copies: dict[int, Future[None]] = {}  # by layer
        self._free = list(reversed(range(count)))
        self._freed = threading.Condition()  # guards _free and _counts
        self._counts: Counter[str] = Counter()

    def begin(self, saves: Sequence[tuple[Save, Sequence[BlockKey]]]) -> None:
        """The saves of this step, with the keys of this rank."""
        keys = [key for _, some in saves for key in some]
        if not keys:
            return
        block_ids = [block for save, _ in saves for block in save.block_ids]
        positions = [save.position + i for save, some in saves for i in range(len(some))]
        slots = self._take(len(keys))
        if dropped := len(keys) - len(slots):
            self._count(save_blocks_dropped=dropped)
        count = len(slots)
        self._batch = _Batch(keys[:count], block_ids[:count], positions[:count], slots)

    def _take(self, count: int) -> list[int]:
        deadline = time.monotonic() + ROOM_S
        with self._freed:
            while self._patient and len(self._free) < count and (left := deadline - time.monotonic()) > 0:
                self._freed.wait(left)
            return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def layer(self, layer: int) -> None:
        """The engine has computed this layer of all blocks of the step."""
        if (batch := self._batch) is not None and layer not in self._copies:
            self._copies[layer] = self._copier.submit(self._copy, layer, batch)

    def _copy(self, layer: int, batch: _Batch) -> None:
        start, nbytes = self._layout.parts[layer]
        into, source = self._staging.address + start, self._layout.address
        for slot, place in zip(batch.slots, self._layout.places(layer, batch.block_ids), strict=True):
            ctypes.memmove(into + slot * self._slot_bytes, source + place, nbytes)

    def end_step(self, intact: bool) -> None:
        """The step is over: wait for its copies, then send them in the background; not if what it computed may be
        wrong."""
        batch = self._batch
        if batch is None:
            return
        begun = time.perf_counter()
        for layer in range(len(self._layout.starts)):
            self.layer(layer)  # those that the engine has not reported
        for copy in self._copies.values():
            copy.result()
        self._batch, self._copies = None, {}
        self._count(save_wait_us=int((time.perf_counter() - begun) * 1e6))
        if intact:
            self._pool.keep_going(self._put(batch), "a save")
        else:
            self._count(save_blocks_discarded=len(batch.slots))
            self._give(batch.slots)

    async def _put(self, batch: _Batch) -> None:
        offsets = [slot * self._slot_bytes for slot in batch.slots]
        facts = [Facts(position) for position in batch.positions]
        try:
            new = await self._pool.store.put_from(batch.keys, REGION, offsets, facts, nbytes=self._layout.block_bytes)
            self._count(saved_blocks=new, saved_bytes=new * self._layout.block_bytes)
        except (StoreError, PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            log.warning("%d blocks were not saved: %s", len(batch.keys), error)
            self._count(saves_failed=1)
        finally:
            self._give(batch.slots)

    def _give(self, slots: Sequence[int]) -> None:
        with self._freed:
            self._free += slots
            self._freed.notify_all()

    @property
    def free_slots(self) -> int:
        with self._freed:
            return len(self._free)

    def take_counts(self) -> Counter[str]:
        with self._freed:
            counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, **counts: int) -> None:
        with self._freed:
            self._counts.update(counts)

    def close(self) -> None:
        """After the pool is closed. Idempotent."""
        self._copier.shutdown()
        self._staging.close()

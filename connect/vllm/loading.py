"""Loading: blocks from the pool straight into the memory of the engine, layer by layer during a step, or between
steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from cache.block import BlockKey
from connect.common.raw_memory import Pieces
from connect.vllm.layout import Layout
from connect.vllm.pool import Pool
from connect.vllm.work import Load
from net.transfer.common.memory import Region

log = logging.getLogger("mooncake.connect")


class LayerGate:
    """The progress of one load during a step. The engine's thread waits, the loop of the pool reports."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._landed = 0
        self._over = False
        self._changed = threading.Condition()

    def land(self, layer: int) -> None:
        """All layers up to this one are in place."""
        with self._changed:
            self._landed = max(self._landed, layer + 1)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is written any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Until this layer has landed or the load is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._landed > layer)

    def wait_over(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over)


class Loading:
    """The loads of one worker into `region`, which is the engine's KV memory. Any thread may call, except `run` and
    what it calls, which are on the loop of the pool."""

    def __init__(self, pool: Pool, region: Region, layout: Layout) -> None:
        self._pool = pool
        self._region = region
        self._layout = layout
        self._lock = threading.Lock()
        self._gates: list[LayerGate] = []
        self._ended: set[str] = set()  # requests whose loads in the background are over
        self._failed: set[int] = set()  # blocks of the engine
        self._failed_in_step = False
        self._counts: Counter[str] = Counter()

    def begin(self, load: Load, keys: Sequence[BlockKey]) -> None:
        """Start it; `keys` are those of this rank."""
        gate = None
        if not load.background:
            gate = LayerGate(len(self._layout.starts))
            self._gates.append(gate)
        self._pool.keep_going(self._run(load, keys, gate), f"the load for {load.request_id}")

    def wait(self, layer: int) -> None:
        """Until this layer of all loads of the step is in place."""
        if not self._gates:
            return
        begun = time.perf_counter()
        for gate in self._gates:
            gate.wait(layer)
        self._count(layer_wait_us=int((time.perf_counter() - begun) * 1e6))

    def end_step(self) -> bool:
        """Wait for the loads of the step; whether all blocks have come intact."""
        for gate in self._gates:
            gate.wait_over()
        self._gates = []
        with self._lock:
            failed, self._failed_in_step = self._failed_in_step, False
        return not failed

    def take_ended(self) -> tuple[set[str], set[int]]:
        """The requests whose loads in the background have ended since the last call, and all blocks of the engine that
        loads did not bring."""
        with self._lock:
            ended, self._ended = self._ended, set()
            failed, self._failed = self._failed, set()
        return ended, failed

    def take_counts(self) -> Counter[str]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    async def _run(self, load: Load, keys: Sequence[BlockKey], gate: LayerGate | None) -> None:
        begun = time.perf_counter()
        missing = set(load.block_ids)
        try:
            missing = await self._fetch(load, keys, gate)
        finally:
            nbytes = (len(keys) - len(missing)) * self._layout.block_bytes
            self._count(
                loads=1,
                loads_by_layer=int(gate is not None),
                load_blocks=len(keys) - len(missing),
                load_bytes=nbytes,
                load_us=int((time.perf_counter() - begun) * 1e6),
                loads_failed=int(bool(missing)),
                load_blocks_failed=len(missing),
            )
            with self._lock:
                self._failed |= missing
                if gate is None:
                    self._ended.add(load.request_id)
                else:
                    self._failed_in_step |= bool(missing)
            if gate is not None:
                gate.end()

    async def _fetch(self, load: Load, keys: Sequence[BlockKey], gate: LayerGate | None) -> set[int]:
        """The blocks of the engine that did not come."""
        missing: set[int] = set()
        at_once = max(1, self._pool.layers_at_once)
        for first in range(0, len(keys), at_once):
            part = slice(first, first + at_once)
            report = gate.land if gate is not None and len(keys) <= at_once else None
            missing |= await self._fetch_part(keys[part], load.block_ids[part], report)
        return missing

    async def _fetch_part(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], report: Callable[[int], None] | None
    ) -> set[int]:
        """Straight from the slots of the homes; if the homes cannot keep all of them readable for that, or one fails,
        block by block from whoever has them. A layer that was reported is never written again."""
        reported = False

        async def landed(layer: int) -> None:
            nonlocal reported
            if report is not None:
                reported = True
                report(layer)

        async with self._pool.store.pinned(keys) as pinned:
            if pinned is not None and await self._read(pinned.read_parts, block_ids, landed):
                return set()
        if reported:
            log.warning("%d blocks of the pool were lost while the engine computed with them", len(keys))
            return set(block_ids)
        arrived: set[int] = set()

        def take(i: int, address: int, nbytes: int) -> None:
            if nbytes == self._layout.block_bytes:
                Pieces(self._layout.pieces(block_ids[i])).copy_from(address, 0, nbytes)
                arrived.add(block_ids[i])

        await self._pool.store.scattered.get_each(keys, take)
        return set(block_ids) - arrived

    async def _read(
        self,
        read_parts: Callable[..., Awaitable[bool]],
        block_ids: Sequence[int],
        landed: Callable[[int], Awaitable[None]],
    ) -> bool:
        layout = self._layout
        return await read_parts(self._region, lambda layer: layout.places(layer, block_ids), layout.parts, landed)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

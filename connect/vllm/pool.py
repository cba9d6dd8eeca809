"""Pool: the pool as one process of the engine uses it: an event loop in a thread, and an entry to the store."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from cache.block import BlockKey
from cache.results import LeadingRun
from cache.store.store import LAYERED_BYTES, Store
from connect.store.nodes import enter
from connect.vllm.layout import NotSupported
from connect.vllm.work import rank_keys
from net.loop.own_thread import EventLoop
from net.transfer.common.memory import Region

log = logging.getLogger("mooncake.connect")

T = TypeVar("T")
START_BYTES = 4 << 30
"""DRAM of a store node that is started because none was named and none runs on this host."""


class Pool:
    """`close` it from the thread that made it."""

    def __init__(self, master: str) -> None:
        """Raises ClusterError, PeerRefused, PeerLost, KeyFileError."""
        self._loop = EventLoop("mooncake-vllm")
        try:
            self._entry = self._loop.run(enter(master, START_BYTES))
        except BaseException:
            self._loop.close()
            raise
        self.store: Store = self._entry.remote.store
        self._begun: set[Future[Any]] = set()

    def fits(self, block_bytes: int) -> None:
        """Raises NotSupported if the pool's slots are smaller."""
        if block_bytes > self.store.block_bytes:
            raise NotSupported(
                f"a block of this engine has {block_bytes} bytes and a slot of the pool {self.store.block_bytes}: "
                f"start store nodes with --value-bytes {block_bytes} or more, or give a smaller --block-size"
            )

    @property
    def layers_at_once(self) -> int:
        """Blocks that can be loaded layer by layer together."""
        return LAYERED_BYTES // self.store.block_bytes

    def find(self, keys: Sequence[BlockKey], ranks: int) -> Future[LeadingRun]:
        """The leading run of `keys` that the pool has for every rank."""

        async def work() -> LeadingRun:
            runs = [await self.store.find(rank_keys(keys, rank, ranks)) for rank in range(ranks)]
            return min(runs, key=lambda run: run.blocks)

        return self.begin(work())

    def attach(self, region: Region) -> None:
        """Let loads write to this memory and saves read it."""

        async def work() -> None:
            self.store.attach(region)

        self._loop.run(work())

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`work` runs on the loop of the store; `close` ends it."""
        begun = self._loop.begin(work)
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        return begun

    def keep_going(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """The same for work that nobody awaits: its failure is logged."""

        def ended(done: Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("%s failed", what, exc_info=error)

        self.begin(work).add_done_callback(ended)

    def close(self, patience_s: float = 0.0) -> None:
        """Work that has begun gets `patience_s` to end, and is then cancelled. Idempotent."""
        if not self._loop.alive:
            return
        for begun in wait(set(self._begun), patience_s).not_done:
            begun.cancel()
        self._loop.run(self._entry.close())
        self._loop.close()

"""WeightHolder: the engine of one node prepares new weights next to the old ones, and drops those that nothing uses.

Preparing reads the tensors from the pool in a thread of low priority, while the engine serves. It ends in three ways: a
switch uses the weights, its coordinator abandons it, or its lease expires because the coordinator is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache.named.tensors import NamedTensors
from cache.store.store import Store
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.named_weights import NamedWeights, UnfitTensors
from engine.config.config import Config
from engine.core.priority import NICEST, step_back
from engine.core.worker import Worker
from engine.loading.new_weights import NewWeights, load_new_weights, obstacle
from engine.model.model_error import ModelError
from net.errors import RemoteError
from net.loop.tasks import spawn

log = logging.getLogger("mooncake.weights")

UNUSED_POLL_S = 0.1


@dataclass(slots=True)
class _Update:
    """What is being prepared, or is ready."""

    name: str
    calls: LoopCalls
    ready: bytes | None = None
    fresh: bool = True  # it was not in memory before
    abandoned: bool = False
    lease: asyncio.TimerHandle | None = None


class WeightHolder:
    """Create it on the event loop of `worker` and `store`."""

    def __init__(self, config: Config, source: ModelSource, worker: Worker, store: Store) -> None:
        self._config, self._source, self._worker, self._store = config, source, worker, store
        self._update: _Update | None = None
        self._dropping: dict[bytes, asyncio.Task[None]] = {}

    @property
    def held(self) -> list[str]:
        """Keys of the weights in memory: the current ones, prepared ones, and those that requests still use."""
        weights = self._worker.weights
        others = [one for one, _ in weights.retired()]
        if self._update is not None and self._update.ready is not None:
            others.append(self._update.ready)
        return [one.hex() for one in dict.fromkeys([weights.current, *others])]

    async def prepare(self, name: str, prefix: str, tenant: str, lease_s: float) -> NewWeights:
        """Read the tensors under `prefix` and keep them ready for `switch`, for `lease_s` seconds. Raises RemoteError:
        busy, unsupported, tensors (not those of the model), failed, abandoned, lost."""
        if (reason := obstacle(self._config)) is not None:
            raise RemoteError(reason, "unsupported")
        self._worker.check()
        if self._update is not None:
            raise RemoteError("another replacement of the weights is under way here", "busy")
        update = self._update = _Update(name, LoopCalls())
        try:
            made = await self._load(update, prefix, tenant)
        except BaseException:
            self._forget(update)
            raise
        if update.abandoned:
            raise RemoteError("the replacement was given up", "abandoned")
        update.ready, update.fresh = made.key, made.key not in self._worker.weights
        if update.fresh:
            self._worker.weights.add(made.key, made.runner)
        else:
            await self._worker.in_thread(made.runner.model.close)
        update.lease = asyncio.get_running_loop().call_later(lease_s, self._expired, update)
        return made

    async def _load(self, update: _Update, prefix: str, tenant: str) -> NewWeights:
        tensors = NamedTensors(self._store, tenant)

        def load() -> NewWeights:
            opened = NamedWeights.find(tensors, update.calls, prefix, self._source.config)
            return load_new_weights(self._config, self._source, opened, self._worker.runner)

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "new-weights", step_back, (NICEST,)) as thread:
            try:
                return await loop.run_in_executor(thread, load)
            except UnfitTensors as error:
                raise RemoteError(str(error), "tensors") from None
            except ModelError as error:
                raise RemoteError(str(error), "failed") from None
            except asyncio.CancelledError:
                if update.abandoned:
                    raise RemoteError("the replacement was given up", "abandoned") from None
                raise
            finally:
                update.calls.stop()  # the thread must not wait for this loop while the loop waits for the thread

    def abandon(self, name: str) -> None:
        """Forget the update of that name, whether it is ready or not. Idempotent."""
        if (update := self._update) is not None and update.name == name:
            self._forget(update)

    def _expired(self, update: _Update) -> None:
        if update is self._update:
            log.warning("prepared weights are dropped: nothing was heard of their replacement any more")
            self._forget(update)

    def _forget(self, update: _Update) -> None:
        update.abandoned = True
        update.calls.stop()
        if self._update is update:
            self._update = None
        if update.lease is not None:
            update.lease.cancel()
        if update.ready is not None and update.fresh:
            self._drop(update.ready)

    def switch(self, weights: bytes) -> bool:
        """New requests use these weights from now on. False if they are not here. Others that were prepared are
        dropped; those that served until now stay until `release`."""
        held = self._worker.weights
        if weights not in held:
            return False
        held.switch(time.monotonic(), weights)
        if (update := self._update) is not None:
            update.ready = None if update.ready == weights else update.ready
            self._forget(update)
        return True

    def release(self, in_use: Collection[bytes], older_than_s: float = 0.0) -> None:
        """Drop replaced weights that are not `in_use` by a request anywhere, as soon as no request here uses them."""
        before = time.monotonic() - older_than_s
        for weights, since in self._worker.weights.retired():
            if weights not in in_use and since <= before:
                self._drop(weights)

    def _drop(self, weights: bytes) -> None:
        if weights not in self._dropping:
            task = self._dropping[weights] = spawn(self._drop_unused(weights), "dropping old weights")
            task.add_done_callback(lambda _: self._dropping.pop(weights, None))

    async def _drop_unused(self, weights: bytes) -> None:
        while self._worker.uses(weights):  # noqa: ASYNC110 - a few times in a node's life
            await asyncio.sleep(UNUSED_POLL_S)
        if self._update is not None and self._update.ready == weights:
            return  # a replacement brings them back
        if (runner := self._worker.weights.drop(weights)) is not None:
            await self._worker.in_thread(runner.model.close)
            log.info("weights %s are dropped", weights.hex() or "of the start")

    async def close(self) -> None:
        if self._update is not None:
            self._forget(self._update)
        for task in list(self._dropping.values()):
            task.cancel()
        await asyncio.gather(*self._dropping.values(), return_exceptions=True)

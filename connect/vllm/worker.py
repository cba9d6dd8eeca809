"""Worker: the connector's half in a worker of the engine, without the engine's types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from connect.engine.borrowed_region import BorrowedRegion
from connect.vllm.layout import Layout
from connect.vllm.loading import Loading
from connect.vllm.options import Options
from connect.vllm.pool import Pool
from connect.vllm.saving import Saving
from connect.vllm.work import StepWork, rank_keys

REGION = "vllm-kv"
LAST_SAVES_S = 5.0


class Worker:
    """One thread calls, in the order: attach, then for each step begin, layer_ready and layer_done for the layers,
    end, take_ended."""

    def __init__(self, pool: Pool, options: Options, rank: int, ranks: int) -> None:
        self._pool = pool
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._layout: Layout | None = None
        self._loading: Loading | None = None
        self._saving: Saving | None = None
        self._failures = 0  # steps with failed loads that were reported
        self._doubtful = 0  # what is computed may be wrong until the scheduler knows as many of them

    def attach(self, tensors: Mapping[str, Any]) -> None:
        """The engine's KV tensors by layer. Raises NotSupported."""
        self._layout = layout = Layout.of(tensors)
        self._pool.fits(layout.block_bytes)
        region = BorrowedRegion(REGION, layout.address, layout.nbytes)
        self._pool.attach(region)
        self._loading = Loading(self._pool, region, layout)
        if self._options.save != "none":
            patient = self._options.role == "kv_producer"
            self._saving = Saving(self._pool, layout, self._options.staging_bytes, patient)

    def begin(self, work: StepWork) -> None:
        """Start the loads of a step and prepare its saves."""
        if self._loading is not None:
            for load in work.loads:
                self._loading.begin(load, rank_keys(load.keys, self._rank, self._ranks))
        if self._saving is not None and work.saves:
            self._saving.begin([(save, rank_keys(save.keys, self._rank, self._ranks)) for save in work.saves])

    def layer_ready(self, name: str) -> None:
        """Wait until the engine may read this layer."""
        if self._loading is not None and self._layout is not None and name in self._layout.layer_of:
            self._loading.wait(self._layout.layer_of[name])

    def layer_done(self, name: str) -> None:
        """The engine has written this layer."""
        if self._saving is not None and self._layout is not None and name in self._layout.layer_of:
            self._saving.layer(self._layout.layer_of[name])

    def end(self, work: StepWork) -> None:
        """The step is over."""
        self._settle()
        if self._saving is not None:
            self._saving.end_step(work.failures_known >= self._doubtful)

    def _settle(self) -> None:
        if self._loading is not None and not self._loading.end_step():
            self._doubtful = self._failures + 1  # it is reported next

    def take_ended(self) -> tuple[set[str], set[int]]:
        """See Loading. The loads of the step are over then: with speculative decoding the engine asks before `end`."""
        if self._loading is None:
            return set(), set()
        self._settle()
        ended, failed = self._loading.take_ended()
        self._failures += bool(failed)
        return ended, failed

    def take_counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for one in (self._loading, self._saving):
            if one is not None:
                counts.update(one.take_counts())
        return counts

    def close(self) -> None:
        """The last saves get a moment. Idempotent."""
        self._pool.close(LAST_SAVES_S)
        if self._saving is not None:
            self._saving.close()

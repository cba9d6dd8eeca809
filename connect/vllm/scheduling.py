"""Scheduling: the connector's half in the scheduler of the engine, without the engine's types: the planner, a clock and
lookups."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet

from cache.block import BlockKey
from cache.results import LeadingRun
from connect.vllm.identity import root_of
from connect.vllm.options import Options
from connect.vllm.planner import Match, Planner, Row
from connect.vllm.pool import Pool
from connect.vllm.work import StepWork
from net.errors import PeerLost, PeerRefused, RemoteError

log = logging.getLogger("mooncake.connect")

SHORT_S, IDLE_S = 0.001, 0.005
"""How long the scheduler waits for a lookup before it goes on: a lookup on one host takes less than a millisecond. A
scheduler without other work waits longer, because it would only ask again."""


class Scheduling:
    """One thread calls. `ranks`: of tensor parallelism."""

    def __init__(self, pool: Pool, root: BlockKey, block_size: int, options: Options, ranks: int) -> None:
        self._pool = pool
        self._root = root
        self._ranks = ranks
        in_step = pool.layers_at_once if ranks == 1 else 0
        # A producer's engine may give away blocks that a step still writes, so nothing is loaded between its steps.
        self._planner = Planner(root, block_size, options, in_step, may_background=options.role != "kv_producer")
        self._open: dict[str, Future[LeadingRun]] = {}

    def arrived(self, request_id: str, tokens: Sequence[int], salt: str, wait_blocks: int | None) -> None:
        """See Planner. Its lookup begins."""
        self._planner.arrived(time.monotonic(), request_id, tokens, salt, wait_blocks)
        self._ask(request_id)

    def match(self, request_id: str, local_tokens: int) -> Match:
        """See Planner."""
        self._collect(request_id, 0.0)
        self._ask(request_id)
        self._collect(request_id, IDLE_S if self._planner.idle else SHORT_S)
        found = self._planner.match(time.monotonic(), request_id, local_tokens)
        if found.tokens is None and self._planner.idle and request_id not in self._open:
            time.sleep(SHORT_S)  # it waits for its producer
        return found

    def _ask(self, request_id: str) -> None:
        if keys := self._planner.question(time.monotonic(), request_id):
            self._open[request_id] = self._pool.find(keys, self._ranks)

    def _collect(self, request_id: str, patience_s: float) -> None:
        future = self._open.get(request_id)
        if future is None:
            return
        run: LeadingRun | None = None
        try:
            run = future.result(patience_s)
        except NotYet:
            return
        except (PeerLost, PeerRefused, RemoteError, OSError, CancelledError) as error:
            log.warning("a lookup failed: %r", error)
        del self._open[request_id]
        self._planner.answered(request_id, run)

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        self._planner.allocated(request_id, block_ids, tokens)

    def sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        return self._planner.sources(request_id, tokens)

    def step(self, rows: Iterable[Row]) -> StepWork:
        return self._planner.step(rows)

    def load_failed(self, block_ids: Iterable[int]) -> None:
        self._planner.load_failed(block_ids)

    def finished(self, request_id: str) -> int:
        """Forget it; the leading blocks of it that are in the pool or on the way."""
        blocks = self._planner.saved_blocks(request_id)
        self._planner.finished(request_id)
        if (future := self._open.pop(request_id, None)) is not None:
            future.cancel()
        return blocks

    def reset(self) -> None:
        """Nothing that the pool has is found any more: the weights have changed. Only this process knows the new
        keys."""
        self._planner.new_root(root_of({"after": self._root.hex(), "nonce": os.urandom(16).hex()}))

    def take_counts(self) -> Counter[str]:
        counts, self._planner.counts = self._planner.counts, Counter()
        return counts

    def close(self) -> None:
        self._pool.close()

"""All workers of --backend: opened, watched and reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from cache.block import BlockKey
from engine.backends.attempts import WorkerAttempts
from engine.backends.load import Costs
from engine.backends.placing import ROLE, WorkerPlacer
from engine.backends.worker import Worker
from engine.config.backend_address import Address
from engine.front.flight_log import FlightLog
from engine.front.placing import PlacementRules
from engine.observe.recent import Recent

CONNECT_S = 3.0
LINE_BYTES = 1 << 20


class Fleet:
    """Create it on the event loop. Raises UsageError."""

    def __init__(self, addresses: Sequence[Address], rules: PlacementRules, root: BlockKey, block_size: int) -> None:
        # Connections are not kept: a worker may close an idle one at the moment in which a request is sent on it.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=LINE_BYTES
        )
        self._root = root
        self._attempts: WorkerAttempts | None = None
        common = Costs()
        self.workers = {one.name: Worker(one, root, self._session, self._lost, common) for one in addresses}
        self.placer = WorkerPlacer(rules, list(self.workers.values()), block_size)

    def attempts(self, log: FlightLog) -> WorkerAttempts:
        """The attempts of this node's requests; call it once."""
        self._attempts = WorkerAttempts(self.workers, self.placer, log, self._root)
        return self._attempts

    async def start(self) -> None:
        """Returns when each worker has answered, or could not be reached."""
        for worker in self.workers.values():
            worker.start()
        await asyncio.gather(*(worker.seen() for worker in self.workers.values()))

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.close()
        await self._session.close()

    def state(self) -> list[dict[str, Any]]:
        """For /debug/state."""
        return [worker.report() for worker in self.workers.values()]

    def live(self, now: float) -> list[dict[str, Any]]:
        """The workers as nodes of GET /live. `now`: unix seconds."""
        return [_row(worker, now) for worker in self.workers.values()]

    def _lost(self, name: str) -> None:
        if self._attempts is not None:
            self._attempts.worker_lost(name)


def _row(worker: Worker, now: float) -> dict[str, Any]:
    load, told = worker.load, worker.load.told
    held = round(told.blocks * told.usage)
    blocks = {"total": told.blocks, "held": held, "free": told.blocks - held}
    blocks |= {"cached": 0, "named": len(worker.prefixes)}
    return {
        "node_id": worker.name,
        "roles": [ROLE],
        "http": worker.url,
        "status": "alive" if worker.away is None else "dead",
        "transport": None,
        "version": None,
        "loading": worker.away,
        "load": {
            "does": [ROLE],
            "running": load.running,
            "waiting": load.waiting,
            "max_running": 0,
            "queued_tokens": load.queued_tokens,
            "work_s": load.work_s(time.monotonic()),
        },
        "blocks": blocks,
        "block_bytes": 0,
        "slot_bytes": 0,
        "block_size": told.block_size,
        "tiers": None,
        "tenants": {},
        "paths": [],
        "longest_stall_ms": 0.0,
        "recent": Recent(max(1, told.block_size)).as_dict(now),
    }

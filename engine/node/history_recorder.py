"""The shell of engine/observe/history.py: tells a node's history what only its parts know, once per second."""

from __future__ import annotations

import asyncio
import time

from engine.front.cluster import Cluster
from engine.node.parts import Blocks, Serving
from engine.observe.history import History
from net.loop.tasks import keep
from sched.membership.member import Member

PERIOD_S = 1.0


class HistoryRecorder:
    """Load and role every second, bytes and tiers at the end of each interval, and members as they come and go."""

    def __init__(self, history: History, serving: Serving, cluster: Cluster, blocks: Blocks) -> None:
        self._history, self._serving, self._cluster, self._blocks = history, serving, cluster, blocks
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        gossip = self._cluster.gossip
        gossip.on_up(lambda member: self._mark("member", member.node_id, "joined"))
        gossip.on_down(self._down)
        gossip.on_suspected(lambda node_id: self._mark("fault", node_id, "does not answer"))
        self._task = keep(self._run, "recording the history")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look(time.time())

    def look(self, now: float) -> None:
        """now: unix seconds."""
        history = self._history
        if (engine := self._serving.engine) is not None:
            record = engine.load.record()
            history.load(record.running, record.waiting)
            history.role(now, frozenset() if engine.load.draining else engine.load.does)
        if history.is_over(now):
            history.close(now, self._cluster.transfer.snapshot(), self._tiers())

    def _tiers(self) -> dict[str, tuple[int, int]]:
        """(used, capacity) in bytes."""
        engine, blocks, share = self._serving.engine, self._blocks, self._blocks.share
        found: dict[str, tuple[int, int]] = {}
        if engine is not None:
            usage, size = engine.pool.usage(), blocks.own.block_bytes
            found["kv"] = (usage["total"] - usage["free"]) * size, usage["total"] * size
        if share is not None:
            slot = blocks.geometry.pool_bytes
            found |= {name: (tier["blocks"] * slot, tier["capacity"] * slot) for name, tier in share.stats().items()}
        return found

    def _down(self, member: Member, reason: str) -> None:
        kind = "member" if reason == "left" else "fault"
        said = "was lost" if reason.startswith("dead") else reason
        self._mark(kind, member.node_id, said)

    def _mark(self, kind: str, node_id: str, text: str) -> None:
        self._history.mark(time.time(), kind, node_id, text)

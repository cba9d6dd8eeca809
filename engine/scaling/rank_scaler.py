"""The shell of sched/scaling/width.py: starts and ends ranks for this node's own load, by --expert-scale-command.

Every node does this for itself, because its ranks are its own. When it stops, it ends those that it started: they would
wait for a node that does not come back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from engine.config.config import Config
from engine.config.scaling import command_parts
from engine.scaling.command import call
from engine.scaling.orders import Orders, period_s, rules_of
from engine.scaling.scaler import loads
from net.gossip.driver import Gossip
from net.loop.tasks import keep
from net.metrics.events import Metrics
from sched.scaling.bounds import Bounds
from sched.scaling.crew import Effect, Start
from sched.scaling.width import RANK, Rank, Width

log = logging.getLogger("mooncake.scaling")


class Ranks(Protocol):
    """The ranks of this node: engine/experts/processes.py."""

    def joined(self) -> list[Rank]: ...

    @property
    def where(self) -> str | None: ...

    @property
    def experts_s(self) -> float:
        """Seconds of a decode step that the experts take; 0 = not known."""


class RankScaler:
    """`config` has --expert-scale-command; `ranks`: of this node."""

    def __init__(self, config: Config, gossip: Gossip, ranks: Ranks, metrics: Metrics) -> None:
        assert config.expert_scale_command is not None and ranks.where is not None
        self._gossip, self._ranks, self._where = gossip, ranks, ranks.where
        self._parts = command_parts(config.expert_scale_command)
        bounds = Bounds(RANK, config.expert_parallel_size, config.max_expert_parallel_size)
        self._rules = rules_of(config, (bounds,))
        self._core = Width(config.node_id, self._rules)
        self._orders = Orders(metrics, self._act, self._core.failed)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep(self._run, "scaling of ranks")

    async def close(self) -> None:
        """Returns when the command has been called for all ranks that this node started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        cut = {effect.node for effect in await self._orders.close()}
        names = sorted(self._core.started | cut)
        found = await asyncio.gather(*(self._call("stop", name) for name in names), return_exceptions=True)
        for name, error in zip(names, found, strict=True):
            if error is not None:
                log.warning("could not stop %s: %s", name, error)

    def state(self) -> dict[str, int]:
        """For GET /debug/state."""
        return self._core.counts

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(period_s(self._rules))
            (node,) = loads([self._gossip.me], self._gossip.records)
            now, ranks = asyncio.get_running_loop().time(), self._ranks
            effects = self._core.step(now, node, ranks.joined(), ranks.experts_s)
            self._orders.give(effects, {RANK: self._core.counts}, self._rules.start_s)

    async def _act(self, effect: Effect) -> None:
        await self._call("start" if isinstance(effect, Start) else "stop", effect.node)

    async def _call(self, action: str, name: str) -> None:
        await call(self._parts, action, RANK, name, self._where)

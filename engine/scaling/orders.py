"""Orders: carries out the decisions of a rule of sched/scaling/, each in a task of its own; logs and counts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from engine.config.config import Config
from engine.scaling.command import CommandFailed
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from sched.scaling.bounds import Bounds
from sched.scaling.crew import Effect, Rules, Stop

log = logging.getLogger("mooncake.scaling")

PERIOD_S = 1.0


def rules_of(config: Config, bounds: tuple[Bounds, ...]) -> Rules:
    """With the objective and the times of the flags."""
    out_s, in_s, start_s = (ms / 1000 for ms in (config.scale_out_ms, config.scale_in_ms, config.scale_start_ms))
    return Rules(bounds, config.classes["standard"], out_s, in_s, start_s)


def period_s(rules: Rules) -> float:
    """Between two looks at the load."""
    return min(PERIOD_S, rules.out_s / 4)


class Orders:
    """`act` does what an effect says, and raises CommandFailed or an error of net/errors.py; then `failed` hears of
    it."""

    def __init__(
        self, metrics: Metrics, act: Callable[[Effect], Awaitable[object]], failed: Callable[[float, Effect], None]
    ) -> None:
        self._metrics, self._act, self._failed = metrics, act, failed
        self._running: dict[asyncio.Task[None], Effect] = {}

    def give(self, effects: Iterable[Effect], counts: Mapping[str, Mapping[str, int]], start_s: float) -> None:
        """`counts`: by role, what the rule counts. `start_s`: after which a start is too late."""
        for role, of_role in counts.items():
            for what, count in of_role.items():
                self._metrics.set("mooncake:scaling_nodes", count, role=role, state=what)
        for effect in effects:
            told = ", ".join(f"{count} {what}" for what, count in counts[effect.role].items())
            if isinstance(effect, Stop) and effect.late:
                log.warning("%s was not ready %g s after its start, and is given up: %s", effect.node, start_s, told)
            else:
                log.info("%s %s: %s", action_of(effect), effect.node, told)
            before = [task for task, other in self._running.items() if other.node == effect.node]
            task = spawn(self._carry_out(effect, before), "scaling")
            self._running[task] = effect
            task.add_done_callback(self._running.pop)

    async def close(self) -> list[Effect]:
        """Commands that run are ended; returns what they were for."""
        running = dict(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return [*running.values()]

    async def _carry_out(self, effect: Effect, before: Collection[asyncio.Task[None]]) -> None:
        """`before`: of the same node. A stop that runs while the node starts again would end the new one."""
        action = action_of(effect)
        if before:
            await asyncio.wait(before)
        try:
            await self._act(effect)
        except (CommandFailed, PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            log.warning("could not %s %s: %s", action, effect.node, error)
            self._metrics.count("mooncake:scaling_actions", action=action, result="failed")
            self._failed(asyncio.get_running_loop().time(), effect)
            return
        self._metrics.count("mooncake:scaling_actions", action=action, result="done")


def action_of(effect: Effect) -> str:
    """In one word: start, drain or stop."""
    return type(effect).__name__.lower()

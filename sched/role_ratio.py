"""A rival rule for role changes, and both by name: the ratio of prefill to decode nodes follows past load. Pure.

DOPD (arXiv 2511.20982, optimal P/D ratio and load forecast): prefill and decode nodes are in the ratio of their stages'
loads, and the loads are those that the recent past predicts. In nodes, from the records that both rules read:

    prefill    sum of w / (w + WAIT_S) over nodes with w seconds of queued work: the utilisation of a queue whose
               work is w on average and whose requests take WAIT_S
    decode     the greater of running requests over seats, and KV blocks over the blocks of one node

Kept: a target ratio instead of a threshold, and a forecast of it (level and trend by double exponential smoothing; the
paper fits ARIMA). Left out: nodes that join and leave with the load, because roles change here, not the number of
nodes; the assignment of mixed-length requests, which --placement and --queue-order decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sched.role_change import BOTH, HOLD_S, WAIT_S, RoleController, Seen, named

LEVEL, TREND = 0.3, 0.1
"""Weights of the newest value in the level and in the trend of a forecast."""

AHEAD = 4
"""Steps of the controller that a forecast looks ahead."""

LEAST_LOAD = 0.5
"""In nodes, of both stages together: a smaller load says nothing about their ratio."""

Change = tuple[str, frozenset[str]]


class Forecast:
    """A value some steps ahead, by Holt's linear method."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0

    def add(self, value: float) -> float:
        """Takes the newest value; returns the one expected AHEAD steps later, at least 0."""
        if self._level is None:
            self._level = value
        else:
            before = self._level
            self._level = LEVEL * value + (1 - LEVEL) * (before + self._trend)
            self._trend = TREND * (self._level - before) + (1 - TREND) * self._trend
        return max(0.0, self._level + AHEAD * self._trend)


def in_nodes(nodes: Sequence[Seen]) -> tuple[float, float]:
    """(load of prefill, load of decode), each in busy nodes."""
    prefill = sum(node.work_s / (node.work_s + WAIT_S) for node in nodes)
    seats = [node for node in nodes if node.max_running]
    running = sum(node.running_soon / node.max_running for node in seats)
    blocks = sum(node.blocks_soon / node.blocks_total for node in nodes if node.blocks_total)
    return prefill, max(running, blocks)


def prefill_nodes(prefill: float, decode: float, count: int) -> int:
    """Of `count` nodes, how many prefill at these loads: in their ratio, and at least one node for each stage."""
    return min(count - 1, max(1, round(count * prefill / (prefill + decode))))


class OptimalRatio(RoleController):
    """DOPD's rule with the hysteresis of RoleController. Nodes that do both do not count, and do not change."""

    def __init__(self, node_id: str, hold_s: float = HOLD_S) -> None:
        super().__init__(node_id, hold_s)
        self._prefill, self._decode = Forecast(), Forecast()

    def _wanted(self, nodes: Sequence[Seen], resting: Collection[str]) -> Change | None:
        loads = in_nodes(nodes)
        prefill, decode = self._prefill.add(loads[0]), self._decode.add(loads[1])
        of_one = [node for node in nodes if len(node.does) == 1]
        if len(of_one) < 2 or prefill + decode < LEAST_LOAD:
            return None
        target = prefill_nodes(prefill, decode, len(of_one))
        now = sum("prefill" in node.does for node in of_one)
        if now == target:
            return None
        give, take = ("decode", "prefill") if now < target else ("prefill", "decode")
        givers = [n.node_id for n in of_one if n.does == {give} and n.can >= BOTH and n.node_id not in resting]
        return (named(givers), frozenset({take})) if givers else None


role_policies: dict[str, Callable[[str, float], RoleController]] = {"threshold": RoleController, "dopd": OptimalRatio}
"""By their names on the command line; made with a node's id and the seconds for which a change must be wanted."""

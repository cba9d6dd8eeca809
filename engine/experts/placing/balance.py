"""Decides when experts move, and where: loads by the choices that were counted since the last look.

After every `steps` steps, one layer per step gets the placement that EPLB computes from its counts, with copies on
different hosts (hosts.py). It does if fewer experts would then be lost with one host, or if no more would be and the
busiest rank would have clearly less to do. A move costs a copy of the expert's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.experts.placing.eplb import apart, rebalanced
from engine.experts.placing.hosts import Hosts, confined, spread
from engine.experts.placing.placement import Placement, imbalance

GAIN = 0.95
"""Experts move if the busiest rank's load falls at least to this share."""
LEAST_CHOICES = 8
"""Per expert on average: fewer say nothing about its load."""


class Counts(Protocol):
    """[layers, experts] numbers of choices since the start."""

    def tolist(self) -> list[list[int]]: ...


class Balance:
    """`steps` between two looks; `least` copies of every expert, on different ranks. `hosts`: tells those of the
    ranks."""

    def __init__(self, steps: int, least: int, hosts: Callable[[], Hosts]) -> None:
        self._steps, self._least, self._hosts = steps, least, hosts
        self._step = 0
        self._before: list[list[int]] = []
        self._loads: list[list[int]] = []  # of layers that are still to be looked at, the last one first

    def next(self, counts: Counts, placement: Placement) -> tuple[int, Placement] | None:
        """Called before each step: (layer, placement in which it has changed), or None."""
        self._step += 1
        if not self._loads and self._step % self._steps == 0:
            now = counts.tolist()
            before = self._before or [[0] * len(row) for row in now]
            self._loads = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(now, before, strict=True)]
            self._before = now
        if not self._loads:
            return None
        loads = self._loads.pop()
        return self._better(len(self._loads), loads, placement)

    def _better(self, layer: int, loads: list[int], placement: Placement) -> tuple[int, Placement] | None:
        if sum(loads) < LEAST_CHOICES * len(loads):
            return None
        copies = placement.ranks * placement.slots
        wanted = apart(rebalanced(loads, copies, 1, 1, placement.ranks, self._least), loads)
        hosts, before = self._hosts(), placement.layers[layer]
        slots = placement.after(layer, spread(wanted, loads, hosts))
        fewer = len(confined(before, hosts)) - len(confined(slots, hosts))
        if fewer < 0 or (fewer == 0 and imbalance(slots, loads) > GAIN * imbalance(before, loads)):
            return None
        return layer, placement.with_layer(layer, slots)

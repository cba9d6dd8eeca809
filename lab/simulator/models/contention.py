"""Nodes that share a machine: a step takes longer while another node computes. They share memory bandwidth, caches,
or the two threads of one core."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self


class Sharing(Protocol):
    """A node as other nodes of the machine see it."""

    @property
    def computing(self) -> bool: ...

    def disturb(self) -> None:
        """The length of its steps changes from the next one on."""


class Contention:
    """`factor`: relative slowdown of a step while any other node computes; 0 = every node has its own machine."""

    def __init__(self, factor: float, nodes: Sequence[Sharing]) -> None:
        if factor < 0:
            raise ValueError(f"--contention must not be negative, got {factor}")
        self._factor, self._nodes = factor, nodes
        self._computing = [False] * len(nodes)
        self._first = 0

    def of_those_from(self, first: int) -> Self:
        """The same machine, for a cluster whose node 0 is node `first` here."""
        made = copy(self)  # it shares the list of those that compute
        made._first = self._first + first
        return made

    def slowness(self, index: int) -> float:
        """The factor of a step of that node that begins now."""
        if not self._factor:
            return 1.0
        others = sum(self._computing) - self._computing[self._first + index]
        return 1.0 + self._factor * (others > 0)

    def changed(self, index: int) -> None:
        """That node may have started or stopped computing."""
        own = self._first + index
        now = self._nodes[own].computing
        if not self._factor or now == self._computing[own]:
            return
        self._computing[own] = now
        for other, node in enumerate(self._nodes):
            if other != own:
                node.disturb()

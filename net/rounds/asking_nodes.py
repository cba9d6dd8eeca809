"""The nodes that a process answers: those it was started with, and those that they name. Pure.

Nodes know each other by gossip, and tell the processes that they ask. A node that has died is named no more.
"""

from __future__ import annotations

from collections.abc import Iterable


class AskingNodes:
    """Nodes are HOST:PORT. `first`: those that are always tried."""

    def __init__(self, first: Iterable[str]) -> None:
        self._first = frozenset(first)
        self._named: dict[str, frozenset[str]] = {}  # by whom; also by those whose connections have ended
        self._connected: set[str] = set()

    def told(self, by: str, nodes: Iterable[str]) -> None:
        """A connected node names all."""
        self._named[by] = frozenset(nodes) | {by}
        self._connected.add(by)

    def lost(self, node: str) -> None:
        """Its connection has ended. What it said counts until another node speaks."""
        self._connected.discard(node)

    @property
    def wanted(self) -> frozenset[str]:
        """Those to be connected with."""
        if self._connected:
            self._named = {by: nodes for by, nodes in self._named.items() if by in self._connected}
        return self._first.union(*self._named.values())

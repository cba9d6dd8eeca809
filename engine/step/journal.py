"""What a node notes of a request while it is there, for the request's timeline. Pure.

Anybody on the node may append; whoever tells the acceptor drains it. Nothing is decided by what is in it.
"""

from __future__ import annotations

from typing import Any

from engine.observe.intervals import Intervals

Entry = tuple[float, str, dict[str, Any]]
"""(this node's monotonic clock in seconds, event, details that are JSON-ready)."""


class Journal:
    """Of one request on one node."""

    __slots__ = ("_entries", "_steps")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._steps = Intervals()

    def note(self, now: float, event: str, detail: dict[str, Any]) -> None:
        self._entries.append((now, event, detail))

    def computed(self, begin: float, end: float, num_tokens: int) -> None:
        """A step in which the request took part with `num_tokens`; monotonic seconds."""
        self._steps.add(begin, end, num_tokens)

    def drain(self, now: float) -> list[Entry]:
        """Everything since the last time; the steps as one event 'computed' that is stamped `now`."""
        entries, self._entries = self._entries, []
        if self._steps:
            entries.append((now, "computed", {"intervals": self._steps.before(now)}))
            self._steps = Intervals()
        return entries

    def __repr__(self) -> str:
        return f"Journal({self._entries})"

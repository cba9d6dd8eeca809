"""Records a request's events on one node, for the request's timeline. Pure.

Any code on the node may append; the code that reports to the acceptor drains it. No decision depends on its content.
"""

from __future__ import annotations

from typing import Any

from engine.observe.intervals import Intervals

Entry = tuple[float, str, dict[str, Any]]
"""(this node's monotonic clock in seconds, event, JSON-ready details)."""


class Journal:
    """The events of one request on one node."""

    __slots__ = ("_entries", "_others_s", "_steps")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._steps = Intervals()
        self._others_s = 0.0

    def note(self, now: float, event: str, detail: dict[str, Any]) -> None:
        self._entries.append((now, event, detail))

    def computed(self, begin: float, end: float, num_tokens: int, others_s: float = 0.0) -> None:
        """Record a step that computed `num_tokens` of the request; `begin` and `end` in monotonic seconds; `others_s`:
        the part of it that went to other prompts."""
        self._steps.add(begin, end, num_tokens)
        self._others_s += others_s

    def drain(self, now: float) -> list[Entry]:
        """Return and remove all entries; the steps become one event 'computed' at time `now`."""
        entries, self._entries = self._entries, []
        if self._steps:
            others = {"others_s": self._others_s} if self._others_s else {}
            entries.append((now, "computed", {"intervals": self._steps.before(now)} | others))
            self._steps, self._others_s = Intervals(), 0.0
        return entries

    def __repr__(self) -> str:
        return f"Journal({self._entries})"

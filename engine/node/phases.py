"""Phases: the time of each part of the startup. Pure."""

from __future__ import annotations


class Phases:
    """Consecutive named parts of one period, in seconds."""

    def __init__(self, begun: float) -> None:
        self._begun = self._last = begun
        self._parts: dict[str, float] = {}

    def end(self, name: str, now: float) -> None:
        """The part `name` lasted from the end of the previous part until now; a part may have several pieces."""
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        """'2.41 s: imports 0.61, tokenizer 0.19, ...'"""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts.items())
        return f"{self._last - self._begun:.2f} s: {parts}"

"""Output text: detokenised piece by piece, cut at stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in streamed text and never lets out the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # a suffix of the text that may yet become a stop string

    def feed(self, delta: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that ended it or None). After a stop, feed no more."""
        text = self._held + delta
        found = [(text.find(stop), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

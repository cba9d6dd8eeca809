"""Output text: detokenised incrementally, cut at stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Finds stop strings in streamed text and never lets out the beginning of one.

    Each character is looked at a few times for each stop string however long those are (Knuth, Morris and Pratt): to
    try every beginning of sixteen long ones against the end of the text took milliseconds for a token."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""  # a suffix of the text that may yet become a stop string

    def feed(self, delta: str) -> tuple[str, str | None]:
        """(text that may go out, the stop string that ended it or None). After a stop, feed no more."""
        if not self._stops:
            return delta, None
        text, known = self._held + delta, len(self._held)
        found = [(known + end - len(one.text), one.text) for one in self._stops if (end := one.feed(delta))]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at], stop
        out = len(text) - max(one.begun for one in self._stops)
        self._held = text[out:]
        return text[:out], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """One stop string, and how much of its beginning the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        self._borders = _borders(text)

    def feed(self, delta: str) -> int:
        """Where in `delta` its first occurrence ends, 0 = nowhere."""
        text, borders, begun = self.text, self._borders, self.begun
        for end, character in enumerate(delta, 1):
            while begun and text[begun] != character:
                begun = borders[begun - 1]
            if text[begun] == character:
                begun += 1
                if begun == len(text):
                    self.begun = 0
                    return end
        self.begun = begun
        return 0


@lru_cache(maxsize=64)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of `text` the length of its longest proper beginning that it also ends with. Kept for the
    choices of one request."""
    found = [0]
    for character in text[1:]:
        length = found[-1]
        while length and text[length] != character:
            length = found[length - 1]
        found.append(length + (text[length] == character))
    return tuple(found)

"""Output text: detokenised incrementally, cut at stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Finds stop strings in streamed text, and never returns the beginning of one.

    Each character is compared a few times per stop string of any length (Knuth, Morris and Pratt). Comparing every
    beginning of sixteen long ones with the end of the text took milliseconds per token."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""  # a suffix of the text that may yet become a stop string

    def feed(self, delta: str) -> tuple[str, str | None]:
        """(text to output, the stop string that ended it or None). After a stop, do not call it again."""
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
        """The text held back; call it when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """One stop string, and the length of its beginning with which the text so far ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        self._borders = _borders(text)

    def feed(self, delta: str) -> int:
        """The end in `delta` of the stop string's first occurrence; 0: none."""
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
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix. Cached for the
    choices of one request."""
    found = [0]
    for character in text[1:]:
        length = found[-1]
        while length and text[length] != character:
            length = found[length - 1]
        found.append(length + (text[length] == character))
    return tuple(found)

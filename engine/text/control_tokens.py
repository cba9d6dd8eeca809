"""Keeps control tokens in a client's chat messages as plain text: "<|im_start|>" in a message starts no turn.

Every such text in the client's data gets a mark after its first character before the template is rendered. The pieces
of the rendered prompt between the marks are tokenised separately, so they contain only the template's control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MARKS = "\ue0f0\ue0f1\ue0f2\ue0f3\ue0f4\ue0f5\ue0f6\ue0f7"
"""Private characters; one that the client has not sent becomes the mark."""

SEARCH_CHARS = 16 << 10
"""Characters per search: at most 3 ms, if each could begin a control token."""


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = len(longest_first[0]) if longest_first else 0

    def mark_for(self, values: Any) -> str:
        """The mark for `marked`; empty if nothing needs a mark. Raises ValueError if the client sent the possible
        marks."""
        texts = list(_texts(values))
        if not any(self._first(text) for text in texts):
            return ""
        return self.free_marks(values)[0]

    def free_marks(self, values: Any) -> list[str]:
        """At least two private characters that no string in `values` contains. Raises ValueError."""
        free = [mark for mark in MARKS if not any(mark in text for text in _texts(values))]
        if len(free) < 2:
            raise ValueError("the messages contain the private characters U+E0F0 to U+E0F7, which mark control tokens")
        return free

    def marked(self, values: Any, mark: str) -> Any:
        """`values` with a mark in every control token that a string in it contains, including keys of objects."""
        if isinstance(values, str):
            while self._first(values) is not None:  # repeats only if control tokens overlap
                values = self._once(values, mark)
            return values
        if isinstance(values, Mapping):
            return {self.marked(key, mark): self.marked(value, mark) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return [self.marked(value, mark) for value in values]
        return values

    def _once(self, text: str, mark: str) -> str:
        pieces, at = [], 0
        while (found := self._first(text, at)) is not None:
            pieces += [text[at : found.start() + 1], mark, text[found.start() + 1 : found.end()]]
            at = found.end()
        return "".join([*pieces, text[at:]])

    def _first(self, text: str, begin: int = 0) -> re.Match[str] | None:
        """The first control token from `begin` on. A search holds the interpreter lock, so it covers SEARCH_CHARS."""
        while begin < len(text):
            end = begin + SEARCH_CHARS
            found = self._any.search(text, begin, end + self._longest - 1)
            if found is not None and found.start() < end:
                return found
            begin = end
        return None


def _texts(values: Any) -> Iterable[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from _texts(list(values.keys()))
        yield from _texts(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)

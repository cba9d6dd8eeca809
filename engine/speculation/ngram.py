"""Prompt lookup: the draft is the text that followed the last earlier occurrence of the text's end. Pure.

Summaries, edits of code and answers that quote copy long runs of their prompt; no model is needed to guess them
(Saxena, "Prompt Lookup Decoding", 2023). The index is a dictionary from every n-gram, shortest <= n <= longest, to the
place after its latest occurrence; it grows with the text, so a step costs (longest - shortest + 1) entries per new
token and the same number of look-ups, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Of one text that only grows at its end; the caller passes the whole text each time."""

    __slots__ = ("_after", "_longest", "_num_indexed", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int], limit: int) -> int:
        """Index at most `limit` more tokens; returns how many it were."""
        begin, end = self._num_indexed, min(len(tokens), self._num_indexed + limit)
        for at in range(begin, end):
            for n in range(self._shortest, min(self._longest, at) + 1):
                self._after[tuple(tokens[at - n : at])] = at
        self._num_indexed = end
        return end - begin

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`: the continuation of the latest earlier occurrence of its
        longest suffix found. Empty without one, and while the index has not caught up with the text.

        A match that reaches into the end of the text goes on into the draft itself: a text of period p is continued
        with period p."""
        if self._num_indexed < len(tokens):
            return []
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            at = self._after.get(tuple(tokens[len(tokens) - n :]))
            if at is not None:
                draft = list(tokens[at : at + count])
                while len(draft) < count:
                    draft.append(draft[at - len(tokens)])
                return draft
        return []

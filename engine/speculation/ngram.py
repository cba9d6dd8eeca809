"""Prompt lookup: the draft is the text that followed the last earlier occurrence of the text's end. Pure.

Summaries, edits of code and answers with quotes copy long runs of their prompt; guessing these needs no model
(Saxena, "Prompt Lookup Decoding", 2023). The index maps every n-gram, shortest <= n <= longest, to the position after
its latest occurrence. It grows with the text, so a step costs (longest - shortest + 1) entries per new token and as
many look-ups, for any length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The index of one text that grows only at its end; the caller passes the whole text each time."""

    __slots__ = ("_after", "_longest", "_num_indexed", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int], limit: int) -> int:
        """Index at most `limit` more tokens; returns their number."""
        begin, end = self._num_indexed, min(len(tokens), self._num_indexed + limit)
        for at in range(begin, end):
            for n in range(self._shortest, min(self._longest, at) + 1):
                self._after[tuple(tokens[at - n : at])] = at
        self._num_indexed = end
        return end - begin

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`: the continuation of the latest earlier occurrence of the
        longest suffix in the index. Empty if there is none, and while the index has not caught up with the text.

        A continuation that reaches the end of the text continues in the draft itself: a text of period p is continued
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


class NgramLookups:
    """An index for each request; requests do not learn from each other."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def of(self, root: bytes) -> NgramIndex:
        return NgramIndex(self._shortest, self._longest)

    def ended(self, root: bytes, output: Sequence[int]) -> None:
        """Nothing is kept."""

    def catch_up(self, limit: int) -> int:
        return 0

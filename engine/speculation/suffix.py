"""Suffix decoding: the draft is what mostly followed the text's end, here and in earlier answers. Pure.

An agent asks nearly the same again and again, and its answers repeat each other. The method (Oliaro et al.,
"SuffixDecoding", arXiv 2411.04975, section 4) matches the end of the text with all texts, continues the match by
frequency, and drafts more tokens after a longer match. Prompt lookup (ngram.py) knows the latest occurrence of a few
tokens; this also knows how often each token followed, and what earlier requests were answered.

The paper keeps suffix trees. Here a table has the latest OCCURRENCES places after each pair of tokens, and those places
count that share the longest text before them with the end of the text. A tree has a node for each of the last DEPTH
tokens before a token; the table has one place per token, and counts over the latest places only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OCCURRENCES = 16
"""Latest places after a pair of tokens; a draft costs about this number times the length of the match."""

DEPTH = 24
"""Longest match that is told apart, in tokens."""

MOST_OWN_TOKENS = 16_384
"""Of a request's own text, to bound its memory."""

BORDER = -1
"""Between two texts of one table; no token."""

Pair = tuple[bytes, int, int]
"""The root of a text and two tokens that follow each other in it."""


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """factor: draft tokens per token of the match. least: the chance that a whole draft is right, by the counts, below
    which it ends. kept_tokens: tokens of earlier answers to keep."""

    factor: float = 1.0
    least: float = 0.1
    kept_tokens: int = 100_000


@dataclass(frozen=True, slots=True)
class Draft:
    """`expected`: the number of its tokens that are right, by the counts."""

    tokens: list[int]
    expected: float


class _Places:
    """Texts one after the other, and the places after each pair of tokens."""

    __slots__ = ("_after", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[Pair, list[int]] = {}

    def add(self, root: bytes, token: int) -> None:
        """The next token of a text, or BORDER."""
        tokens = self.tokens
        tokens.append(token)
        at = len(tokens)
        if at >= 2 and token != BORDER and tokens[-2] != BORDER:
            pair = (root, tokens[-2], token)
            places = self._after.setdefault(pair, [])
            places.append(at)
            if len(places) > OCCURRENCES:
                del places[0]

    def draft(self, root: bytes, text: Sequence[int], most: int, rules: SuffixRules, own: bool) -> Draft:
        """Up to `most` tokens after `text`. own: `text` itself is what this has, so its end is no place, and a
        continuation that reaches the end goes on in the draft."""
        if len(text) < 2:
            return Draft([], 0.0)
        places = [at for at in self._after.get((root, text[-2], text[-1]), ()) if not own or at < len(self.tokens)]
        if not places:
            return Draft([], 0.0)
        matches = [self._match(text, at) for at in places]
        longest = max(matches)
        best = [at for at, match in zip(places, matches, strict=True) if match == longest]
        return self._continue(best, min(most, int(rules.factor * longest)), rules.least, own)

    def _match(self, text: Sequence[int], at: int) -> int:
        """The tokens before `at` that equal the end of `text`, at most DEPTH."""
        tokens, most = self.tokens, min(DEPTH, at, len(text))
        for count in range(most):
            if tokens[at - 1 - count] != text[-1 - count]:
                return count
        return most

    def _continue(self, places: list[int], most: int, least: float, own: bool) -> Draft:
        tokens, end = self.tokens, len(self.tokens)
        draft: list[int] = []
        chance, expected = 1.0, 0.0
        while len(draft) < most:
            known = [(at, token) for at in places if (token := _at(tokens, draft, at, end, own)) != BORDER]
            if not known:
                break
            votes = Counter(token for _, token in reversed(known))  # of equals the latest place decides
            token, count = votes.most_common(1)[0]
            chance *= count / len(places)
            if chance < least:
                break
            draft.append(token)
            expected += chance
            places = [at + 1 for at, following in known if following == token]
        return Draft(draft, expected)


def _at(tokens: Sequence[int], draft: Sequence[int], at: int, end: int, own: bool) -> int:
    if at < end:
        return tokens[at]
    return draft[at - end] if own else BORDER


class SuffixIndex:
    """One text that grows only at its end, with the earlier answers behind it; the caller passes the whole text. Of a
    long prompt only the last MOST_OWN_TOKENS tokens are indexed."""

    __slots__ = ("_own", "_root", "_shared", "_skipped")

    def __init__(self, root: bytes, shared: SuffixLookups) -> None:
        self._root, self._shared = root, shared
        self._own = _Places()
        self._skipped = 0  # tokens at the begin

    def extend(self, tokens: Sequence[int], limit: int) -> int:
        """Index at most `limit` more tokens; returns their number."""
        if not self._own.tokens:
            self._skipped = max(0, len(tokens) - MOST_OWN_TOKENS)
        begin = self._skipped + len(self._own.tokens)
        end = min(len(tokens), begin + limit)
        for at in range(begin, end):
            self._own.add(self._root, tokens[at])
        return end - begin

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`: by this text or by earlier answers, whichever promises more
        right ones. Empty while the index has not caught up with the text."""
        if self._skipped + len(self._own.tokens) < len(tokens):
            return []
        drafts = [self._own.draft(self._root, tokens, count, self._shared.rules, own=True)]
        drafts += self._shared.drafts(self._root, tokens, count)
        return max(drafts, key=lambda draft: draft.expected).tokens


class SuffixLookups:
    """The earlier answers of this node, and an index for each request.

    Only requests with the same root, so with the same cache salt, draft from each other's answers. Answers are kept in
    two parts; when the younger one has a quarter of kept_tokens, the older one goes."""

    def __init__(self, rules: SuffixRules) -> None:
        self.rules = rules
        self._present, self._past = _Places(), _Places()
        self._ended: deque[Iterator[tuple[bytes, int]]] = deque()

    def of(self, root: bytes) -> SuffixIndex:
        return SuffixIndex(root, self)

    def ended(self, root: bytes, output: Sequence[int]) -> None:
        """An answer is complete; `catch_up` adds it."""
        quarter = self.rules.kept_tokens // 4
        if quarter and output:
            self._ended.append((root, token) for token in (*output[-quarter:], BORDER))

    def catch_up(self, limit: int) -> int:
        """Add at most `limit` tokens of answers that have ended; returns their number."""
        used = 0
        while used < limit and self._ended:
            item = next(self._ended[0], None)
            if item is None:
                self._ended.popleft()
                if len(self._present.tokens) >= self.rules.kept_tokens // 4:
                    self._past, self._present = self._present, _Places()
                continue
            self._present.add(*item)
            used += 1
        return used

    def drafts(self, root: bytes, text: Sequence[int], count: int) -> list[Draft]:
        return [places.draft(root, text, count, self.rules, own=False) for places in (self._present, self._past)]

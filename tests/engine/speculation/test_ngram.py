"""Prompt lookup against a scan of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.ngram import NgramIndex


def by_scanning(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """From the definition: the longest suffix that occurred before, its latest earlier occurrence, what came after."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[-n:]:
                text = list(tokens)
                for j in range(count):
                    text.append(text[at + j])
                return text[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.integers(1, 9), max_size=10),
)
def test_equals_a_scan_after_every_growth(text, shortest, more, count, pieces):
    index, longest = NgramIndex(shortest, shortest + more), shortest + more
    ends, at = [], 0
    for piece in pieces:
        at += piece
        ends.append(min(at, len(text)))
    for end in [*ends, len(text)]:
        known = text[:end]
        index.extend(known, 10_000)
        assert index.propose(known, count) == by_scanning(known, shortest, longest, count)


def test_catches_up_in_pieces_and_proposes_only_then():
    text = [1, 2, 3, 4] * 10
    index = NgramIndex(2, 3)
    assert [index.extend(text, 15) for _ in range(4)] == [15, 15, 10, 0]
    assert index.propose(text, 5) == [1, 2, 3, 4, 1]
    behind = NgramIndex(2, 3)
    behind.extend(text, 15)
    assert behind.propose(text, 5) == []


def test_a_period_is_continued_beyond_the_end():
    index = NgramIndex(1, 4)
    index.extend([7, 7], 10)
    assert index.propose([7, 7], 4) == [7, 7, 7, 7]

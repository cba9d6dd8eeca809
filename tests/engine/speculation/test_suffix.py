"""Suffix decoding against a scan of all places, and what requests learn from each other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.suffix import DEPTH, OCCURRENCES, SuffixIndex, SuffixLookups, SuffixRules

ROOT, OTHER = b"a", b"b"


def by_scanning(text: list[int], most: int, factor: float, least: float) -> list[int]:
    """From the definition: the longest matches among the latest places, continued by frequency."""
    places = [at for at in range(2, len(text)) if text[at - 2 : at] == text[-2:]][-OCCURRENCES:]

    def match(at: int) -> int:
        lengths = range(min(at, DEPTH), 0, -1)
        return next((n for n in lengths if text[at - n : at] == text[len(text) - n :]), 0)

    if len(text) < 2 or not places:
        return []
    longest = max(map(match, places))
    alive = [at for at in places if match(at) == longest]
    draft: list[int] = []
    chance = 1.0
    while len(draft) < min(most, int(factor * longest)):
        following = [(text + draft)[at + len(draft)] for at in alive]
        votes = Counter(following)
        token = max(reversed(following), key=lambda one: votes[one])
        chance *= votes[token] / len(alive)
        if chance < least:
            break
        draft.append(token)
        alive = [at for at, one in zip(alive, following, strict=True) if one == token]
    return draft


def index(rules: SuffixRules, root: bytes = ROOT) -> SuffixIndex:
    return SuffixLookups(rules).of(root)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.integers(1, 8),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.lists(st.integers(1, 30), max_size=5),
)
def test_equals_a_scan_after_every_growth(text, most, factor, least, pieces):
    own, end = index(SuffixRules(factor, least)), 0
    for piece in [*pieces, len(text)]:
        end = min(len(text), end + piece)
        own.extend(text[:end], 10_000)
        assert own.propose(text[:end], most) == by_scanning(text[:end], most, factor, least)


def test_catches_up_in_pieces_and_proposes_only_then():
    text, own = [1, 2, 3, 4] * 10, index(SuffixRules())
    assert own.extend(text, 15) == 15 and own.propose(text, 4) == []
    assert [own.extend(text, 15), own.extend(text, 15), own.extend(text, 15)] == [15, 10, 0]
    assert own.propose(text, 4) == [1, 2, 3, 4]


def test_the_more_frequent_continuation_wins_and_the_latest_among_equals():
    for text, expected in (([1, 2, 7, 1, 2, 7, 1, 2, 8, 0, 1, 2], 7), ([1, 2, 7, 0, 1, 2, 8, 3, 1, 2], 8)):
        own = index(SuffixRules())
        own.extend(text, 100)
        assert own.propose(text, 1) == [expected]


def test_a_longer_match_outvotes_more_frequent_ones():
    own, text = index(SuffixRules()), [1, 2, 7, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2]
    own.extend(text, 100)
    assert own.propose(text, 1) == [8]


def learned(lookups: SuffixLookups, root: bytes, *texts: list[int]) -> None:
    for text in texts:
        lookups.ended(root, text)
    while lookups.catch_up(7):
        pass


def test_an_answer_is_drafted_from_an_earlier_one_of_the_same_root_only():
    lookups = SuffixLookups(SuffixRules(factor=4.0))
    learned(lookups, ROOT, [10, 11, 12, 13, 14, 15])
    for root, expected in ((ROOT, [13, 14, 15]), (OTHER, list[int]())):
        mine = lookups.of(root)
        mine.extend([3, 11, 12], 100)
        assert mine.propose([3, 11, 12], 8) == expected


def test_no_draft_crosses_the_border_of_two_answers():
    lookups = SuffixLookups(SuffixRules(factor=9.0))
    learned(lookups, ROOT, [10, 11], [12, 13])
    mine = lookups.of(ROOT)
    for end in ([10, 11], [11, 12]):
        mine.extend(end, 100)
        assert lookups.of(ROOT).propose(end, 8) == []
        assert all(not draft.tokens for draft in lookups.drafts(ROOT, end, 8))


def test_whichever_promises_more_right_tokens_is_drafted():
    lookups = SuffixLookups(SuffixRules(factor=4.0, least=0.0))
    learned(lookups, ROOT, [1, 2, 5, 6, 7, 8])
    text = [1, 2, 3, 1, 2]
    mine = lookups.of(ROOT)
    mine.extend(text, 100)
    assert mine.propose(text, 2) in ([3, 1], [5, 6])
    assert mine.propose(text, 4)[:1] == [3]  # its own text continues in the draft: as many tokens, and it comes first


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), max_size=30), st.integers(0, 40))
def test_no_more_is_kept_than_said(answers, kept):
    lookups = SuffixLookups(SuffixRules(kept_tokens=kept))
    learned(lookups, ROOT, *answers)
    held = len(lookups._present.tokens) + len(lookups._past.tokens)
    assert held <= kept + 4


def test_the_oldest_answers_go_first():
    lookups = SuffixLookups(SuffixRules(kept_tokens=20, factor=4.0))
    learned(lookups, ROOT, *[[100 + n, 200 + n, 300 + n, 400 + n] for n in range(20)])
    found = [any(draft.tokens for draft in lookups.drafts(ROOT, [100 + n, 200 + n], 2)) for n in range(20)]
    assert found == sorted(found) and found[-1] and not found[0]


def test_of_a_long_prompt_only_the_end_is_indexed(monkeypatch):
    monkeypatch.setattr("engine.speculation.suffix.MOST_OWN_TOKENS", 6)
    own, text = index(SuffixRules()), [7, 8, 9, 7, 1, 2, 3, 4, 1, 2]
    assert own.extend(text, 100) == 6
    assert own.propose(text, 2) == [3, 4]
    text += [7, 8]
    assert own.propose(text, 2) == [] and own.extend(text, 100) == 2
    assert own.propose(text, 2) == [], "7, 8 at the begin is not known"

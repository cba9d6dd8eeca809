"""Stop strings in streamed text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text.output import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    finder, out = StopStrings(stops), ""
    for piece in pieces:
        text, stop = finder.feed(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


def test_stop_split_over_pieces_is_cut_out():
    assert stream(["END"], ["some E", "N", "D more"]) == ("some ", "END")


def test_beginning_of_a_stop_is_held_back_only_as_long_as_it_may_be_one():
    finder = StopStrings(["END"])
    assert finder.feed("xEN") == ("x", None)
    assert finder.feed("x") == ("ENx", None)


def test_earliest_stop_wins_and_the_longer_one_at_a_tie():
    assert stream(["b", "ab", "abc"], ["xabc"]) == ("x", "abc")


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.lists(st.text("abc", max_size=4)))
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]):
    text, stop = stream(stops, pieces)
    whole = "".join(pieces)
    cuts = [whole.find(s) for s in stops if s in whole]
    if stop is None:
        assert (text, cuts) == (whole, [])
    else:
        # streaming may only see the stop that is complete first, never let one through
        assert whole.startswith(text + stop)
        assert all(s not in text for s in stops)

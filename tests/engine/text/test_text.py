"""Stop strings in streamed text, JSON and control tokens in prompts: right, and with bounded work."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import control_tokens
from engine.text.control_tokens import MARKS, SEARCH_CHARS, ControlTokens
from engine.text.output import StopStrings
from engine.text.spelt_json import spelt_json
from net.http.openai.schema import MAX_STOP_CHARS, MAX_STOP_STRINGS


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


class Plain:
    """What StopStrings does, by looking for every beginning of every stop."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held = stops, ""

    def feed(self, delta: str) -> tuple[str, str | None]:
        text = self.held + delta
        if hits := [(text.find(stop), stop) for stop in self.stops if stop in text]:
            at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            return text[:at], stop
        begun = [n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])]
        out = len(text) - max(begun, default=0)
        self.held = text[out:]
        return text[:out], None


@settings(max_examples=500)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(st.text("abc", max_size=5), max_size=12))
def test_equal_to_the_plain_search(stops: list[str], pieces: list[str]):
    ours, theirs = StopStrings(stops), Plain(stops)
    for piece in pieces:
        found = ours.feed(piece)
        assert found == theirs.feed(piece)
        if found[1] is not None:
            return


def lines_run(work: Callable[[], object], file: str) -> int:
    """Lines of `file` that work() runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(file):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_long_stops_that_nearly_come_cost_no_more_than_short_ones():
    """The most and the longest that the API accepts, held back for a thousand characters at a time."""
    stops = ["a" * (MAX_STOP_CHARS - 40 * i) + "b" for i in range(1, MAX_STOP_STRINGS + 1)]
    text = ("a" * 1020 + "c") * 3
    finder = StopStrings(stops)
    assert lines_run(lambda: [finder.feed(text[i : i + 5]) for i in range(0, len(text), 5)], "text/output.py") < (
        20 * len(stops) * len(text)
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
    )
)
def test_spelt_json_is_that_of_the_library(value):
    assert spelt_json(value) == json.dumps(value, ensure_ascii=False)
    assert spelt_json(value, indent=1, sort_keys=True) == json.dumps(
        value, ensure_ascii=False, indent=1, sort_keys=True
    )


def test_spelt_json_lets_other_threads_run(monkeypatch):
    """The encoder in C does not, until it is done."""
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    assert spelt_json({"a": [1]}) == '{"a": [1]}'
    monkeypatch.setattr(json.encoder, "c_make_encoder", lambda *_: pytest.fail("the encoder in C was used"))
    assert spelt_json({"a": [1]}) == '{"a": [1]}'


CONTROLS = ("<|a|>", "<|ab|>", "<b>", "|><")


@given(st.text("<|ab>", max_size=60), st.integers(1, 7))
def test_control_tokens_are_found_a_few_characters_at_a_time(text, searched):
    whole = ControlTokens(CONTROLS)
    mark = whole.mark_for(text)
    found = re.search("|".join(map(re.escape, sorted(CONTROLS, key=len, reverse=True))), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tokens, "SEARCH_CHARS", searched)
        assert whole.mark_for(text) == mark and bool(mark) == (found is not None)
        in_pieces = whole.marked(text, MARKS[0])
        assert whole._first(text) is None if found is None else whole._first(text).span() == found.span()
    assert in_pieces == whole.marked(text, MARKS[0]) and in_pieces.replace(MARKS[0], "") == text
    assert not any(control in in_pieces for control in CONTROLS)


def test_no_search_of_a_long_text_is_long():
    """A search lets no other thread run; this text looks like a control token at every character."""
    spans = []

    class Noting:
        def search(self, text: str, begin: int, end: int) -> None:
            spans.append(min(end, len(text)) - begin)

    controls = ControlTokens(CONTROLS)
    controls._any = Noting()
    assert controls.mark_for(["<" * (3 * SEARCH_CHARS)]) == ""
    assert len(spans) == 3 and max(spans) <= SEARCH_CHARS + 10

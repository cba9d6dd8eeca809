"""The decode node's view of a group: blocks are whole when every node has delivered its part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefill_group.arrival import Arrival
from engine.prefill_group.messages import Place
from net.bodies import BodyError, decode, encode


def test_whole_is_what_all_have_delivered():
    arrival = Arrival(["a", "b", "c"], 100)
    arrival.landed("a", 100)
    arrival.landed("b", 64)
    assert arrival.tokens == 0 and arrival.late() == ["b", "c"]
    arrival.landed("c", 32)
    arrival.landed("stranger", 100)
    assert arrival.tokens == 32 and not arrival.complete
    arrival.landed("b", 100)
    arrival.landed("c", 500)
    assert arrival.complete and arrival.tokens == 100 and not arrival.late()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=30))
def test_it_never_goes_back(news):
    arrival, before = Arrival("abc", 40), 0
    for node, tokens in news:
        arrival.landed(node, tokens)
        assert before <= arrival.tokens <= 40
        before = arrival.tokens


@pytest.mark.parametrize(
    ("index", "nodes", "cuts"),
    [(0, ["a"], [0, 3]), (2, ["a", "b"], [0, 1, 3]), (0, ["a", "a"], [0, 1, 3]), (0, ["a", "b"], [0, 3]),
     (0, ["a", "b"], [1, 2, 3]), (0, ["a", "b"], [0, 2, 2])],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(index, nodes, cuts):
    body = {"index": index, "nodes": nodes, "cuts": cuts}
    with pytest.raises(BodyError):
        decode(Place, body)
    assert decode(Place, encode(Place(1, ["a", "b"], [0, 1, 3]))) == Place(1, ["a", "b"], [0, 1, 3])
    assert decode(Place, encode(Place(1, ["a", "b"]))) == Place(1, ["a", "b"], ())

"""EPLB against the example of its source, and what its packing promises; placements in which no rank has an expert
twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.experts.placing.eplb import apart, packed, rebalanced
from engine.experts.placing.placement import Placement, first_placement, imbalance
from engine.model.experts.shares import problem

LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
PLACED = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)


def test_the_example_of_its_source():
    """README of deepseek-ai/EPLB: 12 experts in 4 groups, 16 copies, 2 nodes, 8 GPUs."""
    for loads, expected in zip(LOADS, PLACED, strict=True):
        assert [e for rank in rebalanced(loads, 16, groups=4, nodes=2, ranks=8) for e in rank] == list(expected)


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=24), st.integers(1, 4))
def test_packs_are_equally_full(weights, packs):
    weights = weights[: len(weights) // packs * packs]
    filled = packed(weights, packs)
    assert {len(items) for items in filled} == {len(weights) // packs}
    assert sorted(item for items in filled for item in items) == list(range(len(weights)))


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], int, int, int]:
    """(loads, copies, ranks, least)."""
    ranks = draw(st.integers(2, 6))
    experts = draw(st.integers(2, 20))
    least = draw(st.integers(1, ranks))
    loads = draw(st.lists(st.floats(0, 1e4), min_size=experts, max_size=experts))
    room = [n for n in range(least * experts, ranks * experts + 1) if n % ranks == 0]
    return loads, draw(st.sampled_from(room)), ranks, least


@given(layers())
def test_copies_lie_on_different_ranks(layer):
    loads, copies, ranks, least = layer
    wanted = rebalanced(loads, copies, 1, 1, ranks, least)
    placed = apart(wanted, loads)
    assert [len(experts) for experts in placed] == [copies // ranks] * ranks
    assert all(len(set(experts)) == len(experts) for experts in placed)
    counts = Counter(expert for experts in placed for expert in experts)
    assert counts == Counter(expert for experts in wanted for expert in experts)
    assert min(counts[expert] for expert in range(len(loads))) >= least


@given(layers(), st.data())
def test_a_move_keeps_what_stays(layer, data):
    loads, copies, ranks, least = layer
    before = first_placement(2, len(loads), ranks, copies, least)
    wanted = apart(rebalanced(loads, copies, 1, 1, ranks, least), loads)
    after = before.with_layer(1, before.after(1, wanted))
    assert after.layers[0] == before.layers[0]
    for old, new, experts in zip(before.layers[1], after.layers[1], wanted, strict=True):
        assert sorted(new) == sorted(experts)
        assert all(old[slot] == expert for slot, expert in enumerate(new) if expert in old)


def test_the_table_names_living_copies():
    placement = Placement(3, (((0, 1), (1, 2)),))
    assert placement.table(0, {0, 1}, 2) == [[0, 0], [1, 2], [3, 3]]
    assert placement.table(0, {1}, 2) == [[-1, -1], [2, 2], [3, 3]]
    assert placement.table(0, (), 2) == [[-1, -1]] * 3


def test_imbalance_is_the_busiest_rank_by_the_mean():
    assert imbalance([[0, 1], [2, 3]], [3, 1, 1, 1]) == 4 / 3
    assert imbalance([[0, 1], [0, 2]], [2, 1, 1]) == 1
    assert imbalance([[0], [1]], [0, 0]) == 1


def test_problems_name_the_numbers():
    assert problem(8, 4, 1, 0) is None
    assert problem(8, 4, 2, 4) is None
    assert "no experts" in str(problem(0, 4, 1, 0))
    assert "6 copies of the model's 6 experts do not divide by 4" in str(problem(6, 4, 1, 0))
    assert "--num-redundant-experts 2" in str(problem(6, 4, 1, 0))
    assert "need 3 ranks" in str(problem(6, 2, 3, 0))
    assert "no more than" not in str(problem(6, 2, 1, 8))
    assert "no use for more than 6" in str(problem(6, 2, 1, 8))

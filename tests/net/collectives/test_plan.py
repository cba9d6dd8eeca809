"""Which algorithm, which reductions, which parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.collectives import plan


def test_small_calls_are_direct_and_more_ranks_change_earlier():
    assert plan.is_direct(plan.DIRECT_BYTES, 2) and not plan.is_direct(plan.DIRECT_BYTES + 1, 2)
    assert not plan.is_direct(plan.DIRECT_BYTES, 3)
    assert plan.is_direct(0, plan.MOST_RANKS)


@given(st.integers(0, 1 << 22), st.integers(1, plan.MOST_RANKS), st.sampled_from(sorted(set(plan.WIDTHS.values()))))
def test_parts_cover_everything_once(elements, ranks, width):
    parts = plan.parts(elements * width, ranks, width)
    at = 0
    for offset, nbytes in parts:
        assert offset == at and nbytes % width == 0
        at += nbytes
    assert at == elements * width and len(parts) == ranks


@pytest.mark.parametrize(
    ("dtype", "op", "words"),
    [
        ("float8_e4m3fn", "sum", "float8_e4m3fn cannot be reduced"),
        ("int32", "avg", "avg of int32"),
        ("bfloat16", "bxor", "bxor of bfloat16"),
        ("float32", "median", "no reduction is called 'median'"),
    ],
)
def test_reductions_without_a_meaning_are_refused(dtype, op, words):
    with pytest.raises(ValueError, match=words):
        plan.check_reduction(dtype, op)


def test_different_calls_have_different_signatures():
    calls = [
        ("all_reduce", 5, "float32", "sum"),
        ("all_reduce", 5, "float32", "max"),
        ("reduce", 5, "float32", "sum", 0),
    ]
    assert len({plan.signature(*call) for call in calls}) == 3
    assert all(0 <= plan.signature(*call) < 1 << 63 for call in calls)

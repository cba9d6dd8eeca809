"""The chunks of a long prompt: published formulas, and a pipeline that is played step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.chunks import LEAST_CHUNK_TOKENS, chunk_sizes, makespan, next_chunk, plan, stage_seconds

COST = (0.0, 5e-5, 2e-9)
"""Of the reference's test vector: 131,072 tokens, first chunk 8,192."""


def played(seconds: list[list[float]]) -> float:
    """The end of the last chunk on the last stage, when seconds[stage][chunk] pass; the truth behind `makespan`."""
    ends = [0.0] * len(seconds[0])
    for stage in seconds:
        free = 0.0
        for chunk, took in enumerate(stage):
            free = ends[chunk] = max(free, ends[chunk]) + took
    return ends[-1]


@pytest.mark.parametrize(
    ("smoothing", "count", "four", "eight"), [(0.0, 16, 13.66, 9.11), (1.0, 54, 11.10, 6.13), (0.75, 37, 11.39, 6.47)]
)
def test_the_reference_vector(smoothing, count, four, eight):
    sizes = chunk_sizes(131072, 0, 8192, COST, smoothing, 64)
    assert len(sizes) == count and sum(sizes) == 131072
    for stages, seconds in ((4, four), (8, eight)):
        assert makespan(stage_seconds(sizes, 0, COST, 1 / stages), stages) == pytest.approx(seconds, abs=0.005)
    if smoothing == 1.0:
        assert sizes[:3] == [8192, 5760, 4672]


def test_chunks_take_equally_long():
    sizes = chunk_sizes(60000, 3000, 4096, COST)
    seconds = stage_seconds(sizes, 3000, COST, 0.5)
    floor = [size > 4096 // 4 for size in sizes]
    equal = [s for s, whole in zip(seconds[:-1], floor[:-1], strict=True) if whole]
    assert max(equal) < 1.01 * min(equal)


costs = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.sampled_from([0.0, 1e-10, 1e-8, 1e-6]))


@given(costs, st.integers(2, 20000), st.integers(0, 5000), st.integers(64, 4096), st.sampled_from([1, 16, 64]))
def test_every_token_is_in_one_chunk(cost, new, done, first, align):
    done = done // align * align
    sizes = chunk_sizes(done + new, done, first, cost, 1.0, align)
    assert sum(sizes) == new and 1 not in sizes
    assert all(size % align == 0 for size in sizes[:-1])


@given(costs, st.integers(0, 100000), st.integers(64, 8192), st.floats(0, 1))
def test_a_chunk_is_not_longer_than_the_first_nor_far_shorter(cost, done, first, smoothing):
    size = next_chunk(done, first, cost, smoothing)
    assert max(first // 4, min(first, LEAST_CHUNK_TOKENS)) <= size <= first


@given(costs, st.integers(100, 20000), st.integers(2, 8), st.integers(64, 4096))
def test_a_plan_is_as_good_as_equal_chunks(cost, tokens, stages, most):
    sizes = plan(tokens, 0, stages, cost, most, 16)
    assert sum(sizes) == tokens and max(sizes) <= max(most, 16) + 1
    planned = makespan(stage_seconds(sizes, 0, cost, 1 / stages), stages)
    tuned = chunk_sizes(tokens, 0, most // 16 * 16, cost, align=16)
    assert planned <= makespan(stage_seconds(tuned, 0, cost, 1 / stages), stages) + 1e-9


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20), st.integers(1, 8))
def test_the_makespan_is_that_of_a_pipeline(seconds, stages):
    assert makespan(seconds, stages) == pytest.approx(played([seconds] * stages))

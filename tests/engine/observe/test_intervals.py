"""How much of two activities coincides, against counting small ticks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.observe.intervals import Intervals, efficiency, length, shared, union

TICKS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1]))),
    max_size=8,
)


def ticks(intervals):
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


@given(TICKS, TICKS)
def test_lengths_agree_with_counted_ticks(transfer, compute):
    assert length(transfer) == len(ticks(transfer))
    assert shared(transfer, compute) == shared(compute, transfer) == len(ticks(transfer) & ticks(compute))
    merged = union(transfer)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


def test_efficiency_is_the_hidden_share_of_the_transfer():
    compute = [(0.0, 10.0), (12.0, 20.0)]
    assert efficiency([(5.0, 15.0)], compute) == pytest.approx(0.8)  # 5..10 and 12..15 of 10 seconds
    assert efficiency([(20.0, 30.0)], compute) == 0.0
    assert efficiency([(1.0, 2.0), (1.5, 3.0)], compute) == 1.0
    assert efficiency([], compute) is None


def test_a_full_record_loses_resolution_and_nothing_else():
    record = Intervals(most=8)
    for i in range(1000):
        record.add(float(i), i + 0.5, 3)
    items = record.before(1000.0)
    assert len(record) <= 8
    assert sum(amount for _, _, amount in items) == 3000
    assert (items[0][0], items[-1][1]) == (1000.0, 0.5)

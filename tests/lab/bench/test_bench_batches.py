"""Rows of scripts/bench.py batches."""

from lab.bench import batches


def test_answers_of_one_token_have_no_gap():
    """A value that was not measured is missing, never an invented number."""
    rows = batches._compared("TBT", [], [])
    assert [row.ours for row in rows] == [None] * 4 and all(not row.limits for row in rows)

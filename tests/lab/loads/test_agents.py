"""lab/loads/agents.py against the published summary of the tool&agent trace."""

from __future__ import annotations

from statistics import fmean

import pytest

from lab.formulas.loads import pooled
from lab.loads.agents import agents


def test_it_is_like_the_published_summary():
    rows = agents(0, 23_608)
    assert rows == sorted(rows, key=lambda row: row.timestamp_ms)
    assert fmean(row.input_length for row in rows) == pytest.approx(8590, rel=0.08)
    assert fmean(row.output_length for row in rows) == pytest.approx(182, rel=0.08)
    assert len(rows) / rows[-1].timestamp_ms * 1000 == pytest.approx(23_608 / 3540, rel=0.1)
    half = len(rows) // 2
    tokens = sum(row.input_length for row in rows[half:])
    # token hit rate over the second half, LRU, by blocks of the pool (reference/papers.md 9)
    for blocks, published in (
        (98, 0.326),
        (1011, 0.365),
        (5886, 0.432),
        (9777, 0.488),
        (30232, 0.573),
        (100013, 0.591),
    ):
        found = pooled(rows, blocks)[half:].sum() / tokens
        assert found == pytest.approx(published, abs=0.08), blocks


def test_the_seed_decides():
    assert agents(1, 200) == agents(1, 200) != agents(2, 200)

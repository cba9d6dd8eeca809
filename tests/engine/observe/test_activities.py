"""What took time is read off a timeline, on one clock (scripts/tools.py perfetto and OTLP show it; see test_trace.py
too)."""

from __future__ import annotations

import pytest

from engine.observe.activities import DECODE, KV, LOADS, PREFILL, STATE, activities
from tests.engine.observe.test_timeline import told


def test_intervals_and_states():
    found = activities(told().as_dict())
    rows = [(one.node, one.row, one.amount, one.unit) for one in found if one.amount is not None]
    assert sorted(rows) == sorted(
        [
            ("p", LOADS, 640, "bytes"),
            ("p", PREFILL, 64, "tokens"),
            ("p", PREFILL, 36, "tokens"),
            ("d", DECODE, 1, "tokens"),
            ("p", KV, 300, "bytes"),
            ("p", KV, 60, "bytes"),
        ]
    )
    states = {one.name: (one.begin, one.end) for one in found if one.row == STATE}
    assert states == {"waiting": (1.003, 1.05), "running": (1.05, 1.26)}
    assert all("intervals" not in one.facts for one in found)
    chunk = next(one for one in found if one.amount == 64)
    assert (chunk.begin, chunk.end) == (pytest.approx(1.05), pytest.approx(1.15))


def test_other_clocks_are_shifted():
    timeline = told()
    timeline.clocks = {"p": {"offset_s": 0.5, "error_s": 0.001}}
    chunk = next(one for one in activities(timeline.as_dict()) if one.amount == 64)
    assert chunk.begin == pytest.approx(0.55)

"""bench_stalls: what it reads off a node's metrics. The runs themselves need real nodes."""

from __future__ import annotations

import pytest

from lab.bench.stalls import Waits, rows_of, waits_in
from net.loop.stalls import Stall
from net.metrics.events import Metrics


def metrics_after(*stalls: Stall) -> Waits:
    metrics = Metrics("m", "node")
    for stall in stalls:
        metrics.observe_stall(stall)
    return waits_in(metrics.text().decode())


def test_waits_are_read_off_the_metrics_of_a_node():
    short, long = Stall(0.0001, 0.0001, 0.0, 0.0), Stall(0.004, 0.001, 0.002, 0.001)
    waits = metrics_after(*[short] * 98, long, long)
    assert sum(waits.counts) == 100
    assert waits.causes == pytest.approx({"computing": 0.002, "core": 0.004, "lock": 0.002})
    assert waits.share_over(0.002) == pytest.approx(0.02)
    assert 0 < waits.percentile_ms(0.5) < 0.2
    assert 3 < waits.percentile_ms(0.99) <= 5


def test_a_window_is_what_came_since():
    short, long = Stall(0.0001, 0.0001, 0.0, 0.0), Stall(0.004, 0.001, 0.002, 0.001)
    window = metrics_after(short, long, long).since(metrics_after(short, long))
    assert sum(window.counts) == 1
    assert window.share_over(0.002) == 1.0
    assert window.causes == pytest.approx({"computing": 0.001, "core": 0.002, "lock": 0.001})


def test_the_causes_of_a_row_are_shares_of_the_long_waits():
    rows = {row.metric: row.ours for row in rows_of("case", metrics_after(Stall(0.004, 0.001, 0.002, 0.001)), 1.5, 0.1)}
    assert [rows[f"of these: {cause}"] for cause in ("computing", "core", "lock")] == pytest.approx([25, 50, 25])
    assert rows["cores taken by the node"] == 1.5

"""The gossip benchmark on clusters small enough for a test: the numbers have to be there and of the right order."""

from __future__ import annotations

from lab.bench.gossip import detection_rows, false_deaths, state_rows
from sched.membership.member import presets


def test_state_rows_measure_traffic_and_age():
    rows = {row.metric: row.ours for row in state_rows(8, warm_s=1.0, measure_s=1.0, seed=1)}
    assert 0 < rows["sent per node, mean"] <= rows["sent per node, most"] < 0.2
    assert 0 < rows["age of information p50"] < rows["age of information p99"] <= rows["age of information, most"] < 1
    assert rows["CPU per node, simulator included"] > 0


def test_detection_rows_measure_crashes():
    rows = {row.metric: row.ours for row in detection_rows(12, crashes=2, seed=1)}
    assert presets["lan"].probe_period_s / 2 < rows["first suspicion p50"] < rows["dead for everybody p50"]
    assert presets["lan"].suspicion_s(12) <= rows["dead for everybody, most"] <= presets["lan"].detection_s(12)


def test_a_few_node_minutes_with_pauses_kill_nobody():
    deaths, pauses, refuted, _ = false_deaths(size=10, hours=0.1, seed=2)
    assert deaths == 0 and pauses > 3 and refuted > 0

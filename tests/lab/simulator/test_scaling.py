"""Simulated nodes that start and leave, and nodes that differ in speed and price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import StepModel
from lab.simulator.result import figures

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 1e-2, 1e-3, 0.0), token_bytes=1, kv_tokens=200_000,
    chunk_tokens=1000, nic_bytes_s=1e12, nic_latency_s=1e-9, max_batch=16,
)  # fmt: skip
BASE = SimConfig(
    step_models="exact", step_noise=0.0, prefill=1, decode=1, cache_blocks=0, output_lengths="oracle",
    scale_start_s=20.0, scale_in_s=60.0,
)  # fmt: skip
BOUNDS = "prefill=1..6,decode=1..6"


def tide(low: float, high: float, phase_s: float = 400.0) -> list[TraceRow]:
    """Prompts of half a second and answers of 300 tokens: `low` per second, then `high`, then `low`."""
    rows, at = [], 0.0
    while at < 3 * phase_s:
        rows.append(TraceRow(1000 * at, 500, 300, [len(rows)]))
        at += 1 / (high if phase_s <= at < 2 * phase_s else low)
    return rows


@pytest.fixture(scope="module")
def scaled() -> Cluster:
    return Cluster(replace(BASE, autoscale=BOUNDS), MODEL).played(tide(0.43, 6.0))


def test_nodes_follow_the_load_and_no_request_is_lost(scaled):
    found = figures(scaled)
    assert found["finished"] == found["requests"] and found["retries"] == 0
    starts = [at for at, action, _ in scaled.scaling.changes if action == "start"]
    drains = [at for at, action, _ in scaled.scaling.changes if action == "drain"]
    assert 400 <= min(starts) <= max(starts) < 800 < max(drains) and len(drains) > 6
    static_hours = 12 * found["seconds"] / 3600
    assert found["node_hours"] < 0.5 * static_hours
    assert found["goodput"] > 0.9


def test_hours_are_paid_from_the_start_to_the_end_of_a_node(scaled):
    scaling = scaled.scaling
    name = next(name for _, action, name in scaling.changes if action == "start")
    began = next(at for at, action, changed in scaling.changes if changed == name and action == "start")
    left = next(at for at, action, changed in scaling.changes if changed == name and action == "drain")
    assert scaling.paid_s(name, 0.0, began) == 0.0
    assert scaling.paid_s(name, 0.0, left) == pytest.approx(left - began)
    assert scaling.paid_s(name, left + 100.0, 5000.0) == 0.0, "it has finished its requests by then"
    assert scaling.paid_s("prefill-0", 0.0, 100.0) == 100.0, "it was on from the beginning"


def test_without_autoscale_every_node_is_paid_all_the_time():
    cluster = Cluster(BASE, MODEL).played(tide(0.5, 0.5, 20.0))
    assert cluster.scaling.changes == [] and cluster.scaling.paid_s("decode-0", 5.0, 25.0) == 20.0


def test_a_slow_class_takes_longer_and_costs_what_it_says():
    rows = tide(0.2, 0.2, 50.0)
    fast = figures(Cluster(BASE, MODEL).played(rows))
    slow = figures(Cluster(replace(BASE, node_classes="prefill:1:0.5:0.25,decode:1:0.5:0.25"), MODEL).played(rows))
    assert slow["ttft_s"]["mean"] == pytest.approx(2 * fast["ttft_s"]["mean"], rel=0.05)
    assert slow["tbt_s"]["mean"] == pytest.approx(2 * fast["tbt_s"]["mean"], rel=0.05)
    hourly = [found["cost_per_million_tokens"] / found["node_hours"] for found in (slow, fast)]
    assert hourly[0] == pytest.approx(0.25 * hourly[1])


def test_placement_by_cost_keeps_the_dear_nodes_idle_while_the_cheap_ones_do():
    unlike = replace(BASE, prefill=2, decode=2, node_classes="prefill:1:0.5:0.2,decode:1:0.5:0.2")
    rows = tide(0.2, 0.2, 100.0)
    costs = {}
    for policy in ("mooncake", "mooncake-cost"):
        cluster = Cluster(replace(unlike, placement=policy), MODEL).played(rows)
        costs[policy] = figures(cluster)["busy_cost_per_million_tokens"]
        cheap = {job.prefill for job in cluster.jobs}
        assert ("prefill-0" in cheap) == (policy == "mooncake-cost")
    assert costs["mooncake-cost"] < 0.5 * costs["mooncake"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"autoscale": "decode"}, "ROLE=LEAST..MOST"),
        ({"autoscale": "store=1..2"}, "store is none of"),
        ({"autoscale": "decode=2..4"}, "--decode must be between 2 and 4"),
        ({"autoscale": BOUNDS, "role_changes": True}, "--role-changes"),
        ({"node_classes": "decode:4"}, "ROLE:COUNT:SPEED:COST"),
        ({"node_classes": "store:1:1:1"}, "name each of"),
        ({"node_classes": "decode:1:0:1"}, "SPEED is above 0"),
    ],
)
def test_what_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        replace(BASE, **change)

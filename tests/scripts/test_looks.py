"""Looks at runs whose shocks, faults and loads are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from scripts.lab import looks
from sim.cluster import Cluster
from sim.config import SimConfig
from sim.job import Job


def job(arrival: float, prefix: int = 0, prefill: str = "p0", seconds: float = 1.0, gap: float = 0.1) -> Job:
    made = Job(0, arrival, 1000, 10, (0,), prefill=prefill, prefix_tokens=prefix)
    made.sent = made.placed = made.begun = arrival
    made.first_token = made.prefilled = made.joined = arrival + seconds
    made.finished, made.longest_gap = made.joined + 1.0, gap
    return made


def cluster(jobs: list[Job], nodes: int = 2) -> SimpleNamespace:
    return SimpleNamespace(jobs=jobs, nodes=[SimpleNamespace(name=f"p{i}", roles=("prefill",)) for i in range(nodes)])


def test_a_recovery_is_timed_from_the_shock():
    """Half found before request 200; nothing for 25 s; half again."""
    jobs = [job(float(t), 500 if t < 200 or t >= 225 else 0) for t in range(400)]
    told = looks.recovery(cluster(jobs))
    assert told == {"recovery_s": 40.0, "steady_hit_rate": 0.5}, "30..40 s is the first whole good window"
    never = looks.recovery(cluster([job(float(t), 500 if t < 200 else 0) for t in range(400)]))
    assert math.isinf(never["recovery_s"])


def test_imbalance_is_that_of_the_worst_window_after_the_shock():
    even = [job(0.5 * t, prefill=f"p{t % 2}", seconds=0.5) for t in range(200)]
    assert looks.imbalance(cluster(even))["worst_imbalance"] == pytest.approx(1.0, abs=0.1)
    assert looks.placed_imbalance(cluster(even))["imbalance"] == pytest.approx(1.0, abs=0.05)
    skewed = [job(0.5 * t, prefill="p0" if t < 160 else f"p{t % 2}", seconds=0.5) for t in range(200)]
    assert looks.imbalance(cluster(skewed))["worst_imbalance"] == pytest.approx(2.0, abs=0.05)
    early = [job(0.5 * t, prefill="p0" if t < 100 else f"p{t % 2}", seconds=0.5) for t in range(200)]
    assert looks.imbalance(cluster(early))["worst_imbalance"] < 1.1, "before the shock it does not count"


def test_good_again_is_the_end_of_the_last_bad_window():
    jobs = [job(0.5 * t, gap=5.0 if 100 <= 0.5 * t < 108 else 0.1) for t in range(400)]
    told = looks.Back(100.0)(cluster(jobs))
    assert told == {"back_after_s": 10.0, "hurt": 16.0}
    assert looks.Back(150.0)(cluster(jobs))["back_after_s"] == 0.0


def test_stages_that_swing_against_each_other_are_seen():
    jobs = []
    for t in range(600):
        busy = (t // 30) % 2  # half a minute of long prefills, half a minute of long decodes
        one = job(float(t), seconds=10.0 if busy else 0.5)
        one.finished = one.joined + (0.5 if busy else 20.0)
        jobs.append(one)
    told = looks.swing(cluster(jobs))
    assert told["stage_correlation"] < -0.4 and told["decode_idle_share"] > 0.1
    assert math.isnan(looks.swing(cluster(jobs[:2]))["stage_correlation"])


def test_the_guard_is_read_off_the_policy():
    told = looks.guard(Cluster(SimConfig(placement="mooncake-learned")))
    assert told["worst_estimate_ratio"] == 1.0 and told["departed"] == 0.0
    assert looks.guard(Cluster(SimConfig())) == {}

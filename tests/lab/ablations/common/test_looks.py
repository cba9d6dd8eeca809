"""Looks at runs whose shocks, faults and loads are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from lab.ablations.common import looks
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.models.step_models import PRESETS


def job(arrival: float, prefix: int = 0, prefill: str = "p0", seconds: float = 1.0, gap: float = 0.1) -> Job:
    made = Job(0, arrival, 1000, 10, (0,), prefill=prefill, prefix_tokens=prefix)
    made.sent = made.placed = made.begun = arrival
    made.first_token = made.prefilled = made.joined = arrival + seconds
    made.finished, made.longest_gap = made.joined + 1.0, gap
    return made


def cluster(jobs: list[Job], nodes: int = 2) -> SimpleNamespace:
    for index, one in enumerate(jobs):
        one.index = index
    return SimpleNamespace(
        jobs=jobs, config=SimConfig(), nodes=[SimpleNamespace(name=f"p{i}", roles=("prefill",)) for i in range(nodes)]
    )


def with_model(jobs: list[Job]) -> SimpleNamespace:
    return SimpleNamespace(jobs=jobs, model=PRESETS["llama3-70b-8xa800"])


def test_a_recovery_is_timed_from_the_shock():
    """Half found before request 200; nothing for 25 s; half again."""
    jobs = [job(float(t), 500 if t < 200 or t >= 225 else 0) for t in range(400)]
    told = looks.recovery(cluster(jobs))
    assert told["recovery_s"] == 40.0 and told["steady_hit_rate"] == 0.5, "30..40 s is the first whole good window"
    never = looks.recovery(cluster([job(float(t), 500 if t < 200 else 0) for t in range(400)]))
    assert math.isinf(never["recovery_s"])


def test_a_recovery_is_held_against_what_an_unlimited_cache_finds():
    """Every second prompt has the block of the one before; from request 200 on all prompts are new for 100 s, and what
    could be found is found late, from 230 s on."""
    jobs = []
    for t in range(600):
        able = t % 2 == 1 and not 200 <= t < 300
        one = job(float(t), 512 if able and not 300 <= t < 330 else 0)
        one.blocks = (t - 1 if able else t, 10_000 + t)
        jobs.append(one)
    mine = cluster(jobs)
    best = looks.findable(mine)
    assert [best[t] for t in (1, 199, 201, 299, 301)] == [512, 512, 0, 0, 512]
    mine.jobs = jobs[:400]  # the shock is in the middle, at 200 s
    told = looks.recovery(mine)
    assert told["unlimited_recovery_s"] == 110.0, "nothing can be found before"
    assert told["recovery_s"] == 140.0 and told["found_steady"] == 1.0
    assert told["caught_up_s"] == 10.0, "all of nothing is found"


def test_effective_requests_and_the_last_one():
    jobs = [job(float(t), seconds=1.0 if t % 2 else 31.0) for t in range(10)]
    for one in jobs:
        one.gaps = [(8, 0.05), (1, 0.15)]
    jobs[1].gaps = [(9, 0.05)]
    told = looks.Effective((0.1, 0.2))(with_model(jobs))
    assert (told["effective_100"], told["effective_200"]) == (0.1, 0.5)
    assert told["prefill_s"] == pytest.approx(with_model(jobs).model.prompt_s(1000, 0))
    assert looks.last_request(with_model(jobs)) == {"last_ttft_s": 1.0, "last_total_s": 2.0}


def node_with(blocks: set[int]) -> SimpleNamespace:
    return SimpleNamespace(arena=SimpleNamespace(blocks=blocks))


def test_copies_are_counted_by_popularity():
    one, two = job(0.0), job(1.0)
    one.blocks, two.blocks = (7, 8), (7, 9)
    held = SimpleNamespace(jobs=[one, two], nodes=[node_with({7, 8}), node_with({7})])
    assert looks.Copies((1, 2, 50))(held) == {"copies_1": 2.0, "copies_2": 1.0}


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
    cluster = Cluster(SimConfig(placement="mooncake-learned"))
    assert looks.guard(cluster) == {}, "no acceptor has had a request"
    cluster.placing.acceptors.policy_for(Job(0, 0.0, 100, 10, (1,)))
    told = looks.guard(cluster)
    assert told["worst_estimate_ratio"] == 1.0 and told["departed"] == 0.0
    assert looks.guard(Cluster(SimConfig())) == {}

"""DynaServe in the simulator: where a prompt is split, and that both parts are computed once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig
from lab.simulator.rivals.dynaserve import DynaServe, SplitPlacement, split_point
from sched.admission import Limits
from sched.placement.view import View
from tests.lab.simulator.test_cluster import check, rows
from tests.lab.simulator.test_cluster import ran as ran_8b
from tests.lab.simulator.test_node import ran
from tests.sched.placement.test_placement import FAST, NOW, demand, node

BOTH = ("prefill", "decode")


@seed(31)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=30),
    st.lists(st.floats(0, 10), min_size=30, max_size=30),
    st.integers(0, 5),
)
def test_the_split_point_is_the_best_of_all(up, down, least):
    first, second = np.cumsum(up).tolist(), np.cumsum(down)[::-1].tolist()
    most = least + len(up) - 1
    found = split_point(lambda x: first[x - least], lambda x: second[x - least], least, most)
    worst = [max(first[x - least], second[x - least]) for x in range(least, most + 1)]
    assert worst[found - least] == min(worst)


def place(nodes, wanted, policy=None):
    policy = policy or DynaServe(Limits(), random.Random(0))
    view = View(NOW, [one for one, _ in nodes], FAST, 256)
    return policy.place(NOW, wanted, view, np.array([float(local) for _, local in nodes]))


def split_of(nodes, wanted=None, policy=None) -> int:
    placed = place(nodes, wanted or demand(1600, max_tokens=1), policy)
    assert isinstance(placed, SplitPlacement) and (placed.prefill, placed.decode) == ("a", "b")
    return placed.split_tokens


A = node("a", ("prefill",))


def test_two_idle_nodes_share_a_prompt_evenly():
    nodes = [node("a", BOTH), node("b", BOTH, wait_s=0.001)]
    assert split_of(nodes) == pytest.approx(800, abs=16)
    ttft_s = place(nodes, demand(1600, max_tokens=1)).estimates["ttft_s"]
    assert ttft_s == pytest.approx(1.6, abs=0.05), "the parts of one prompt follow each other"


def test_the_busy_node_gets_less():
    assert split_of([A, node("b", BOTH, wait_s=0.4)]) == pytest.approx(1000, abs=32)
    assert split_of([A, node("b", BOTH, wait_s=9.0)]) == 0, "plain disaggregation: all of the prompt on a"
    nodes = [node("a", ("prefill",), local_tokens=800), node("b", BOTH)]
    assert split_of(nodes) == pytest.approx(1200, abs=16), "a has half of it, and computes half of the rest"


def test_a_node_that_would_be_done_as_early_keeps_all_of_the_request():
    busy = [node("a", BOTH), node("b", BOTH, wait_s=9.0)]
    placed = place(busy, demand(1600, max_tokens=50))
    assert placed.prefill == placed.decode == "a" and not isinstance(placed, SplitPlacement)
    only = place([node("a", BOTH), node("d", ("decode",))], demand(1600, max_tokens=1))
    assert only.prefill == only.decode == "a", "nobody else can compute a part"
    cached = [node("a", ("prefill",), wait_s=0.6), node("b", BOTH, local_tokens=1500)]
    assert place(cached, demand(1600, max_tokens=1)).prefill == "b"
    full = [node("a", BOTH, free_blocks=3), node("b", BOTH, free_blocks=3)]
    assert not isinstance(place(full, demand(1600)), SplitPlacement), "no room to decode: as without a split"


def test_the_decode_steps_of_the_second_node_count():
    nodes = [A, node("b", BOTH, wait_s=0.001, step_s=0.01)]
    few, many = (split_of(nodes, demand(1600, max_tokens=n)) for n in (1, 51))
    assert many - few == pytest.approx(250, abs=32), "half a second of steps on b: a quarter of a second more on a"


def test_a_part_that_is_not_there_yet_counts_as_work():
    policy, nodes = DynaServe(Limits(), random.Random(0)), [A, node("b", BOTH, wait_s=0.001)]
    first, second = (split_of(nodes, policy=policy) for _ in range(2))
    assert second - first == pytest.approx(400, abs=32), "b owes 0.8 s"


CONFIG = SimConfig(
    prefill=0, decode=0, mixed=2, placement="dynaserve", batching_policy="dynamic", tbt_budget_s=10.0,
    step_models="exact", step_noise=0.0, output_lengths="oracle", probe_s=0.0, cache_blocks=50, block_tokens=100,
)  # fmt: skip


@pytest.mark.parametrize("overlap", ["layer", "none"])
def test_both_parts_are_computed_once_and_the_answer_follows(overlap):
    row = TraceRow(0.0, 2000, 20, list(range(20)))
    cluster = ran(replace(CONFIG, kv_overlap=overlap), [row])
    (job,) = cluster.jobs
    first, second = cluster.by_name[job.prefill], cluster.by_name[job.decode]
    assert first.busy_s == pytest.approx(1.1, abs=0.11), "and 0.9 s of prefill and 0.2 s of decode on the other one"
    assert job.first_token == pytest.approx(2.0, abs=0.1)
    assert first.busy_s + second.busy_s == pytest.approx(2.0 + 19 * 0.01, abs=0.05)
    assert cluster.network.bytes_moved == pytest.approx(1000 * first.busy_s, abs=1)
    assert first is not second and job.decoded == 20 and not job.split


def test_everything_ends_and_the_caches_have_the_parts():
    for shape in ({"prefill": 2, "decode": 0, "mixed": 2}, {"prefill": 0, "decode": 0, "mixed": 4}):
        cluster = ran_8b(SimConfig(placement="dynaserve", **shape), rows(80, gap_ms=5.0))
        check(cluster)
    assert cluster.network.bytes_moved > 0, "some were split"


def test_a_split_prompt_survives_a_crash_of_either_node():
    for name in ("prefill-0", "mixed-0"):
        config = SimConfig(
            placement="dynaserve", prefill=2, decode=0, mixed=2, faults=f"crash:{name}@0.2+2", detect_s=0.1
        )
        cluster = ran_8b(config, rows(80, gap_ms=5.0))
        assert all(job.decoded == job.output_tokens and not job.split for job in cluster.jobs)
        for one in cluster.nodes:
            assert not one.queue and not one.coming and not one.batch.running and not one.batch.promised_tokens
        assert cluster.failures.lost > 0

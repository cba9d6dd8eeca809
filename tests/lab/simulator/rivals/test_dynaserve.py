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
from tests.lab.simulator.test_node import MODEL, ran
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


def test_two_idle_nodes_share_a_prompt_evenly():
    placed = place([node("a", BOTH), node("b", BOTH, running=9)], demand(1600, max_tokens=1))
    assert isinstance(placed, SplitPlacement) and placed.split_tokens == pytest.approx(800, abs=16)
    assert placed.estimates["ttft_s"] == pytest.approx(1.6, abs=0.05), "the parts of one prompt follow each other"


def test_the_busy_node_gets_less_and_one_that_is_very_busy_nothing():
    nodes = [node("a", BOTH, wait_s=0.5), node("b", BOTH, wait_s=0.5 + 0.4)]
    placed = place(nodes, demand(1600, max_tokens=1))
    assert placed.prefill == placed.decode == "a", "b has more work than a: all of it on a"
    decoding = [node("a", ("prefill",)), node("b", BOTH, wait_s=0.4)]
    placed = place(decoding, demand(1600, max_tokens=1))
    assert (placed.prefill, placed.decode) == ("a", "b") and placed.split_tokens == pytest.approx(1000, abs=32)
    placed = place([node("a", ("prefill",)), node("b", BOTH, wait_s=9.0)], demand(1600, max_tokens=1))
    assert (placed.prefill, placed.decode, placed.split_tokens) == ("a", "b", 0), "plain disaggregation"
    placed = place([node("a", ("prefill",), wait_s=0.3), node("b", BOTH, wait_s=0.4)], demand(64, max_tokens=1))
    assert placed.prefill == placed.decode == "b", "plain colocation"


def test_the_decode_steps_of_the_second_node_count():
    nodes = [node("a", ("prefill",)), node("b", BOTH, step_s=0.01)]
    few, many = (place(nodes, demand(1600, max_tokens=n)).split_tokens for n in (1, 50))
    assert many - few == pytest.approx(250, abs=48), "half a second of steps on b: a quarter of a second more on a"


def test_a_part_that_is_not_there_yet_counts_as_work():
    policy, nodes = DynaServe(Limits(), random.Random(0)), [node("a", ("prefill",)), node("b", BOTH)]
    first, second = (place(nodes, demand(1600, max_tokens=1), policy).split_tokens for _ in range(2))
    assert second - first == pytest.approx(400, abs=32), "b owes 0.8 s"


CONFIG = SimConfig(
    prefill=1, decode=0, mixed=1, placement="dynaserve", batching="dynamic", tbt_budget_s=10.0, step_models="exact",
    step_noise=0.0, output_lengths="oracle", probe_s=0.0, cache_blocks=50, block_tokens=100,
)  # fmt: skip


@pytest.mark.parametrize("overlap", ["layer", "none"])
def test_both_parts_are_computed_once_and_the_answer_follows(overlap):
    row = TraceRow(0.0, 2000, 20, list(range(20)))
    cluster = ran(replace(CONFIG, kv_overlap=overlap), [row])
    (job,) = cluster.jobs
    first, second = cluster.nodes
    assert first.busy_s == pytest.approx(1.1, abs=0.11) and job.first_token == pytest.approx(2.0, abs=0.1)
    assert first.busy_s + second.busy_s == pytest.approx(2.0 + 19 * 0.01, abs=0.05)
    assert cluster.network.bytes_moved == pytest.approx(1000 * first.busy_s, abs=1)
    assert job.prefill == first.name and job.decode == second.name and job.decoded == 20 and not job.split


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
        check(cluster)
        assert cluster.failures.lost > 0

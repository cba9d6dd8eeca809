"""Faults: everything that is placed still ends with all of its tokens, and the same seed gives the same bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.faults import drawn, parse
from lab.simulator.job import Job
from lab.simulator.models.step_models import PRESETS
from lab.simulator.result import figures, kept

MODEL = PRESETS["llama3-8b-h200"]


def rows(count: int, gap_ms: float = 40.0) -> list[TraceRow]:
    made = []
    for i in range(count):
        own = list(range(100 + 8 * (i // 2), 105 + 8 * (i // 2)))
        made.append(TraceRow(i * gap_ms, 4000 + 13 * (i % 7), 20 + i * 37 % 180, [*range(3), *own]))
    return made


def ran(requests: list[TraceRow], **config: object) -> Cluster:
    cluster = Cluster(SimConfig(**config), MODEL)
    for _ in cluster.run(requests):
        pass
    return cluster


def check(cluster: Cluster, requests: list[TraceRow]) -> None:
    for job, row in zip(cluster.jobs, requests, strict=True):
        if job.refused:
            assert "alive" in job.refused, "only where all nodes of a role are down"
            continue
        assert not math.isnan(job.finished), job
        assert job.resumed + job.decoded == row.output_length
        assert job.input_tokens + job.output_tokens == row.input_length + row.output_length
        assert job.arrival <= job.first_token <= job.finished
    for node in cluster.nodes:
        assert not node.queue and not node.coming and not node.batch.running and not node.batch.joining
        assert node.batch.promised_tokens == node.batch.held_tokens == 0
        assert node.queued_s == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    placement=st.sampled_from(["mooncake", "mooncake-central-greedy", "random", "least-load"]),
    overlap=st.sampled_from(["layer", "none"]),
    every_s=st.floats(0.2, 3),
    down_s=st.floats(0.05, 2),
    detect_s=st.floats(0.01, 0.5),
    loss=st.floats(0, 0.9),
    mixed=st.booleans(),
)
@example(
    seed=952, placement="least-load", overlap="layer", every_s=0.75, down_s=1.5, detect_s=0.5, loss=0.75, mixed=False
)
def test_every_token_comes_once_whatever_crashes(seed, placement, overlap, every_s, down_s, detect_s, loss, mixed):
    shape = {"prefill": 0, "decode": 0, "mixed": 4} if mixed else {"prefill": 3, "decode": 3}
    requests = rows(40)
    first, again = (
        ran(
            requests, seed=seed, placement=placement, kv_overlap=overlap, crash_every_s=every_s, crash_down_s=down_s,
            detect_s=detect_s, gossip_loss=loss, pool_blocks=100, **shape,
        )
        for _ in range(2)
    )  # fmt: skip
    check(first, requests)
    assert orjson.dumps(figures(first)) == orjson.dumps(figures(again))


def test_a_decode_node_that_dies_costs_a_gap_and_not_the_answer():
    requests = rows(40)
    cluster = ran(requests, prefill=2, decode=2, faults="crash:decode-0@0.8+5", detect_s=0.5)
    check(cluster, requests)
    hit = [job for job in cluster.jobs if job.resumed]
    assert hit and cluster.failures.lost == sum(job.retries for job in cluster.jobs) >= len(hit)
    assert min(job.longest_gap for job in hit) > 0.5 > max(j.longest_gap for j in cluster.jobs if not j.retries)
    assert all(job.decode == "decode-1" for job in hit)
    told = figures(cluster)
    assert told["output_tokens_s"] * told["seconds"] == pytest.approx(sum(row.output_length for row in requests))


def test_an_answer_of_which_only_the_last_token_came_from_another_attempt_is_slow():
    """And its gap counts: it has as many tokens as all its attempts gave."""
    job = Job(0, 0.0, 100, 100, ())
    job.first_token, job.decoded = 1.0, 99
    job.restart(5.0)
    job.finished, job.longest_gap = 400.0, 395.0
    assert (job.output_tokens, job.answer_tokens) == (1, 100)
    assert job.tbt == pytest.approx(399 / 99) and not kept(job, ttft_slo_s=30.0, tbt_slo_s=0.1)
    cluster = Cluster(SimConfig(prefill=1, decode=1), MODEL)
    cluster.jobs.append(job)
    assert figures(cluster)["longest_gap_s"]["max"] == 395.0


def test_a_node_that_lost_its_memory_finds_nothing():
    same = [TraceRow(1000.0 * i, 4096, 5, list(range(8))) for i in range(10)]
    cluster = ran(same, prefill=1, decode=1, faults="crash:prefill-0@4.5+0.1", detect_s=0.1)
    assert [job.source for job in cluster.jobs] == ["none", *["local"] * 4, "none", *["local"] * 4]


def test_others_turn_from_a_slow_node_once_they_know():
    requests = rows(80)
    for placement in ("mooncake", "least-load"):
        even = ran(requests, placement=placement, prefill=2, decode=2)
        slow = ran(requests, placement=placement, prefill=2, decode=2, faults="slow:prefill-0@0+100x8", detect_s=0.1)
        check(slow, requests)
        count = [sum(job.prefill == "prefill-0" for job in cluster.jobs) for cluster in (even, slow)]
        assert count[1] < count[0], placement
    gap = [figures(c)["ttft_s"]["mean"] for c in (even, slow)]
    assert gap[1] > gap[0]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    copies=st.integers(1, 3),
    every_s=st.floats(0.1, 3),
    down_s=st.floats(0.05, 2),
    crash_every_s=st.sampled_from([0.0, 1.0]),
    mixed=st.booleans(),
)
def test_every_token_comes_once_whatever_ranks_are_lost(seed, copies, every_s, down_s, crash_every_s, mixed):
    shape = {"prefill": 0, "decode": 0, "mixed": 4} if mixed else {"prefill": 3, "decode": 3}
    requests = rows(40)
    cluster = ran(
        requests, seed=seed, expert_ranks=8, expert_copies=copies, rank_loss_every_s=every_s, rank_down_s=down_s,
        crash_every_s=crash_every_s, crash_down_s=0.5, detect_s=0.1, pool_blocks=100, **shape,
    )  # fmt: skip
    check(cluster, requests)
    assert set(cluster.failures.slowness) <= {8 / (8 - away) for away in range(copies)}


def test_a_lost_rank_makes_a_node_with_copies_slower_and_loses_nothing():
    requests = rows(80)
    shape = {"prefill": 1, "decode": 1, "expert_ranks": 4, "expert_copies": 2, "output_lengths": "oracle"}
    whole, less, half = (
        ran(requests, **shape, step_noise=0.0, faults=faults)
        for faults in ("", "rank:decode-0@0+100", "slow:decode-0@0+100x1.3333333333333333")
    )
    check(less, requests)
    assert less.failures.lost == 0
    assert figures(less)["tbt_s"] == pytest.approx(figures(half)["tbt_s"])
    assert figures(less)["tbt_s"]["mean"] > 1.2 * figures(whole)["tbt_s"]["mean"]


@pytest.mark.parametrize(
    ("copies", "faults"), [(1, "rank:decode-0@0.8+5"), (2, "rank:decode-0@0.7+5,rank:decode-0@0.8+5")]
)
def test_a_node_without_a_copy_serves_nobody_until_the_rank_is_back(copies, faults):
    requests = rows(40)
    cluster = ran(requests, prefill=2, decode=2, expert_ranks=8, expert_copies=copies, faults=faults, detect_s=0.1)
    check(cluster, requests)
    hit = [job for job in cluster.jobs if job.resumed]
    assert hit and all(job.decode == "decode-1" for job in hit) and cluster.failures.lost >= len(hit)


def test_a_node_keeps_its_cache_when_it_lost_a_rank():
    same = [TraceRow(1000.0 * i, 4096, 5, list(range(8))) for i in range(10)]
    cluster = ran(same, prefill=1, decode=1, expert_ranks=8, faults="rank:prefill-0@4.5+0.1", detect_s=0.1)
    assert [job.source for job in cluster.jobs] == ["none", *["local"] * 9]


def test_ranks_are_lost_only_where_there_are_some():
    with pytest.raises(ValueError, match="--expert-ranks"):
        SimConfig(rank_loss_every_s=1.0)
    with pytest.raises(ValueError, match="--expert-ranks"):
        ran(rows(1), faults="rank:decode-0@1+2")


WRONG = [
    "rank:prefill-0@1+2x3",
    "crash:prefill-0",
    "slow:prefill-0@1+2",
    "crash:prefill-0@1+2x3",
    "crash:nobody@1+2",
    "slow:prefill-0@1+2x0.5",
]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_faults_are_named(text):
    with pytest.raises(ValueError, match="--faults"):
        parse(text, ["prefill-0"])


def test_crashes_by_seed_spare_nodes_that_are_down():
    found = drawn(["a", "b"], 1.0, 5.0, 200.0, 3)
    assert found == drawn(["a", "b"], 1.0, 5.0, 200.0, 3) != drawn(["a", "b"], 1.0, 5.0, 200.0, 4)
    for node in ("a", "b"):
        times = [fault.at for fault in found if fault.node == node]
        assert len(times) > 10 and all(later - earlier >= 5.0 for earlier, later in pairwise(times))


def test_a_node_loses_a_rank_while_another_is_away_and_apart_from_crashes():
    ranks, crashes = (drawn(["a", "b"], 1.0, 5.0, 200.0, 3, kind) for kind in ("rank", "crash"))
    assert {fault.at for fault in ranks}.isdisjoint(fault.at for fault in crashes)
    for node in ("a", "b"):
        times = [fault.at for fault in ranks if fault.node == node]
        assert any(later - earlier < 5.0 for earlier, later in pairwise(times))


def test_a_rank_that_was_lost_before_a_crash_does_not_come_back_after_it():
    shape = {"prefill": 1, "decode": 1, "expert_ranks": 4, "expert_copies": 2, "detect_s": 0.1}
    requests = rows(100, gap_ms=100.0)
    faults = "rank:decode-0@0+6,crash:decode-0@1+1,rank:decode-0@4+100"
    cluster = ran(requests, **shape, faults=faults)
    check(cluster, requests)
    assert cluster.failures.slowness == [1.0, 4 / 3]


def test_lost_ranks_of_a_slow_node_multiply():
    shape = {"prefill": 1, "decode": 1, "expert_ranks": 4, "expert_copies": 2}
    cluster = ran(rows(80), **shape, faults="slow:decode-0@0+100x3,rank:decode-0@0.5+100")
    assert cluster.failures.slowness == [1.0, pytest.approx(4.0)]

"""Steps of a simulated node: who shares them, under each batching policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.costs import costs
from lab.simulator.models.step_models import StepModel
from sched.batching import StepLoad
from sched.classes import spell, with_objectives
from sched.stretch import MOST

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 1e-2, 0.0, 0.0), token_bytes=1, kv_tokens=100_000,
    chunk_tokens=1000, nic_bytes_s=1e12, nic_latency_s=1e-9,
)  # fmt: skip
"""A millisecond per token of a prompt, ten per decode step."""
BASE = SimConfig(
    step_models="exact", step_noise=0.0, prefill=0, decode=0, mixed=1, queue_order="fcfs", probe_s=0.0, cache_blocks=0
)


def ran(config: SimConfig, rows: list[TraceRow], model: StepModel = MODEL) -> Cluster:
    cluster = Cluster(config, model)
    for _ in cluster.run(rows):
        pass
    return cluster


def prompts(*tokens: int, output: int = 1) -> list[TraceRow]:
    return [TraceRow(0.0, count, output, [100 * i + k for k in range(9)]) for i, count in enumerate(tokens)]


def test_prompts_share_a_step_up_to_its_budget():
    alone = ran(BASE, prompts(200, 300, 900))
    assert [job.first_token for job in alone.jobs] == pytest.approx([0.2, 0.5, 1.4])
    together = ran(replace(BASE, step_prompts=8), prompts(200, 300, 900))
    assert [job.first_token for job in together.jobs] == pytest.approx([1.0, 1.0, 1.4])
    assert together.nodes[0].steps == 2


def test_a_running_request_is_in_every_step_or_waits():
    rows = [TraceRow(0.0, 10, 50, [1]), TraceRow(100.0, 2000, 1, list(range(2, 9)))]
    first, _ = ran(BASE, rows).jobs
    assert first.longest_gap == pytest.approx(0.01 + 0.999)  # a chunk with it, and the fixed part of a step
    waiting, other = ran(replace(BASE, batching_policy="prefill-first"), rows).jobs
    assert waiting.longest_gap == pytest.approx(2.01)
    assert other.first_token < waiting.finished
    chunked, _ = ran(replace(BASE, batching_policy="mixed", prefill_chunk_tokens=100), rows).jobs
    assert chunked.longest_gap == pytest.approx(0.11)


def test_dynamic_chunks_keep_the_time():
    rows = [TraceRow(0.0, 10, 60, [1]), TraceRow(100.0, 2000, 1, list(range(2, 9)))]
    first, _ = ran(replace(BASE, batching_policy="dynamic", tbt_budget_s=0.2), rows).jobs
    assert 0.19 < first.longest_gap < 0.2001


def test_dynamic_chunks_know_what_the_node_has_learnt():
    """The start measures no step with prompts and decodes, which take three times as long here: the first of them is
    too long, and the node learns from it. One that knew the step model would keep the limit from the first on."""
    dear = replace(MODEL, mixed=(0.01, 0.0, 0.0, 3e-3, 0.0))
    rows = [TraceRow(0.0, 10, 60, [1]), TraceRow(100.0, 900, 1, list(range(2, 9)))]
    config = replace(BASE, batching_policy="dynamic", tbt_budget_s=0.2)
    told = {}
    for kind in ("learnt", "exact"):
        cluster = ran(replace(config, step_models=kind), rows, dear)
        told[kind] = [seconds for _, seconds in cluster.jobs[0].gaps if seconds > 0.05]
    assert max(told["exact"]) <= 0.2 and len(told["exact"]) > 12
    assert told["learnt"][0] == pytest.approx(0.01 + 0.57, rel=0.05), "190 tokens at the price of a prefill step"
    assert max(told["learnt"][1:]) < 0.3 and len(told["learnt"]) > 5


def test_a_step_whose_prompt_has_nothing_left_to_compute_is_one_of_decodes():
    learnt = costs("learnt", MODEL, lambda: 1.0)
    for _ in range(200):
        learnt.both([(0, 100)], 2, 50, 0.02)
    assert learnt.decode_s(2, 50) == pytest.approx(0.02, rel=0.05), "10 ms before"


def test_noise_of_the_steps_is_noise_of_dynamic_chunks():
    rows = [TraceRow(0.0, 10, 60, [1]), TraceRow(100.0, 900, 1, list(range(2, 9)))]
    config = replace(BASE, batching_policy="dynamic", tbt_budget_s=0.2, step_noise=0.2)
    chunks = {}
    for kind in ("learnt", "exact"):
        cluster = Cluster(replace(config, step_models=kind), MODEL)
        policy, load = cluster.nodes[0]._policy, StepLoad(1000, 4, 400, 0)
        before = policy.prefill_tokens(load)
        cluster.played(rows)
        chunks[kind] = before, policy.prefill_tokens(load)
    assert chunks["exact"][0] == chunks["exact"][1] == 190
    assert chunks["learnt"][0] != chunks["learnt"][1] and 190 not in chunks["learnt"]


def test_without_a_fixed_limit_prompts_and_streams_miss_their_objectives_by_the_same_factor():
    """Prompts of 0.5 s arrive twice a second, while every decode step of 10 ms needs its share."""
    rows = [TraceRow(500.0 * i, 500, 100, [100 * i]) for i in range(60)]
    classes = with_objectives("standard:ttft=2,tbt=0.05")
    config = replace(BASE, batching_policy="dynamic", tbt_budget_s=0.0, slo=spell(classes))
    fair, fixed = (ran(one, rows).jobs for one in (config, replace(config, tbt_budget_s=0.05)))
    prompt = max(job.ttft for job in fair) / classes["standard"].ttft_s
    stream = max(job.longest_gap for job in fair) / classes["standard"].tbt_s
    assert stream == pytest.approx(min(MOST, prompt), rel=0.25) and stream > 1.5
    assert max(job.ttft for job in fair) < 0.7 * max(job.ttft for job in fixed)
    few = [TraceRow(500.0 * i, 150, 20, [100 * i]) for i in range(60)]
    assert max(job.longest_gap for job in ran(config, few).jobs) <= 0.05 + 1e-9


def test_measured_mixed_steps_and_the_way_in():
    measured = replace(MODEL, mixed=(0.5, 0.0, 0.0, 0.0, 0.0), front_s=0.25)
    rows = [TraceRow(0.0, 10, 50, [1]), TraceRow(100.0, 900, 1, list(range(2, 9)))]
    first, second = ran(BASE, rows, measured).jobs
    assert first.first_token == pytest.approx(0.26)
    assert second.first_token == pytest.approx(0.35 + 0.5)


def test_the_hand_over_is_behind_the_first_token():
    apart = replace(BASE, mixed=0, prefill=1, decode=1)
    slow = replace(MODEL, handover_s=0.4)
    quick, late = (ran(apart, prompts(100, output=3), model).jobs[0] for model in (MODEL, slow))
    assert late.first_token == quick.first_token
    assert late.longest_gap == pytest.approx(quick.longest_gap + 0.4)


def test_nodes_of_a_machine_slow_each_other_down():
    apart = replace(BASE, mixed=0, prefill=1, decode=1, kv_overlap="none")
    rows = [TraceRow(0.0, 100, 21, [1]), TraceRow(150.0, 1000, 1, list(range(2, 6)))]
    free, other = ran(apart, rows).jobs
    assert (free.finished, other.first_token) == (pytest.approx(0.3), pytest.approx(1.15))
    slow, later = ran(replace(apart, contention=1.0), rows).jobs
    assert slow.finished == pytest.approx(0.45, abs=0.011)  # 15 of its 20 steps run with the prompt
    assert later.first_token == pytest.approx(2.15)  # its step began with a decode


@pytest.mark.parametrize("wrong", [{"batching_policy": "nonsense"}, {"step_prompts": 0}, {"contention": -1.0}])
def test_wrong_flags_are_named(wrong):
    with pytest.raises(ValueError, match="--" + next(iter(wrong)).replace("_", "-")):
        Cluster(replace(BASE, **wrong), MODEL)


APART = replace(BASE, prefill=1, decode=1, mixed=0, reservations=True, block_tokens=100)


def test_a_prompt_waits_for_memory_of_its_decode_node_before_it_is_computed():
    """As nodes do it: the decode node holds the blocks of a prompt from its reservation on. Two of 600 tokens do not
    fit into 1,000; without reservations the prefill node computes the second one meanwhile."""
    small, rows = replace(MODEL, kv_tokens=1000), prompts(600, 600, output=20)
    first, second = ran(replace(APART, reservations=False), rows, small).jobs
    assert (first.first_token, second.first_token) == pytest.approx((0.6, 1.2), abs=2e-3)
    first, second = ran(APART, rows, small).jobs
    assert first.first_token == pytest.approx(0.6, abs=2e-3) and first.finished == pytest.approx(0.79, abs=2e-3)
    assert second.first_token == pytest.approx(first.finished + 0.6, abs=2e-3)
    roomy = ran(APART, rows).jobs
    assert [job.first_token for job in roomy] == pytest.approx([0.6, 1.2], abs=2e-3)


@pytest.mark.parametrize("shape", [{"prefill": 2, "decode": 1}, {"prefill": 0, "decode": 0, "mixed": 2}])
@pytest.mark.parametrize("output", [1, 80])
def test_reserved_memory_is_given_back(shape, output):
    rows = [replace(row, timestamp_ms=20.0 * i) for i, row in enumerate(prompts(*(600, 300, 900) * 6, output=output))]
    cluster = ran(replace(APART, **shape, placement="random"), rows, replace(MODEL, kv_tokens=1500))
    assert all(job.finished > job.first_token - 1e-9 for job in cluster.jobs)
    assert any(job.prefill != job.decode for job in cluster.jobs)
    assert [node.batch.held_tokens for node in cluster.nodes] == [0] * len(cluster.nodes)


def test_a_prompt_that_waits_for_memory_begins_again_if_its_prefill_node_crashes():
    rows = prompts(600, 600, 600, output=20)
    config = replace(APART, prefill=2, faults="crash:prefill-0@0.7+0.1")
    cluster = ran(config, rows, replace(MODEL, kv_tokens=1000))
    assert all(job.finished > 0 for job in cluster.jobs)
    assert [node.batch.held_tokens for node in cluster.nodes] == [0, 0, 0]


def test_steps_with_prompts_alone_are_bounded_too():
    """--max-step-ms of nodes: 250 ms are 250 tokens here, of a prompt that fits into one step."""
    cluster = ran(replace(BASE, max_step_s=0.25), prompts(900))
    assert cluster.nodes[0].steps == 4 and cluster.jobs[0].first_token == pytest.approx(0.9)
    assert ran(BASE, prompts(900)).nodes[0].steps == 1

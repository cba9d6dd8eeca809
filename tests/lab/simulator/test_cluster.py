"""Whole runs: everything that is placed ends, nothing is left behind, and the same seed gives the same bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.loads.trace import TraceRow, jittered, read_trace, write_trace
from lab.simulator.cluster import Cluster
from lab.simulator.config import IDEAL, SimConfig
from lab.simulator.models.step_models import PRESETS, StepModel
from lab.simulator.result import figures
from sched.placement.table import placements

MODEL = PRESETS["llama3-8b-h200"]


def rows(count: int, gap_ms: float = 50.0, shared: int = 3) -> list[TraceRow]:
    """Chats that share their first blocks by twos."""
    made = []
    for i in range(count):
        own = [1000 + 10 * (i // 2) + k for k in range(3)]
        made.append(TraceRow(i * gap_ms, 512 * (shared + 3) - 7 * (i % 5), 1 + i * 37 % 80, [*range(shared), *own]))
    return made


def ran(config: SimConfig, requests: list[TraceRow], model: StepModel = MODEL) -> Cluster:
    cluster = Cluster(config, model)
    for _ in cluster.run(requests):
        pass
    return cluster


def check(cluster: Cluster) -> None:
    for job in cluster.jobs:
        assert job.refused or job.arrival <= job.placed <= job.begun <= job.first_token <= job.finished, job
        assert job.refused or job.decoded == job.output_tokens
        assert not job.estimates or min(job.estimates.values()) >= 0, "no prefix is longer than the prompt"
        assert job.prefix_tokens < job.input_tokens
    for node in cluster.nodes:
        assert not node.queue and not node.coming and not node.batch.running and not node.batch.joining
        assert node.batch.promised_tokens == node.batch.held_tokens == 0
        assert node.queued_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("placement", placements)
def test_every_placement_serves_everything(placement):
    for shape in ({"prefill": 3, "decode": 2}, {"prefill": 0, "decode": 0, "mixed": 3}):
        check(ran(SimConfig(placement=placement, pool_blocks=100, **shape), rows(60)))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    placement=st.sampled_from(sorted(placements)),
    order=st.sampled_from(["fcfs", "edf", "srpt", "weighted-fair"]),
    overlap=st.sampled_from(["layer", "none"]),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    gap_ms=st.floats(0.1, 200),
)
def test_the_same_seed_gives_the_same_bytes(seed, placement, order, overlap, prefill, decode, gap_ms):
    config = SimConfig(
        seed=seed, placement=placement, queue_order=order, kv_overlap=overlap, prefill=prefill, decode=decode,
        pool_blocks=50, cache_blocks=40,
    )  # fmt: skip
    requests = jittered(rows(30, gap_ms), 1.0, seed)
    first, second = (ran(config, requests) for _ in range(2))
    check(first)
    assert orjson.dumps(figures(first)) == orjson.dumps(figures(second))


def test_a_prefix_is_found_where_it_is_and_fetched_where_that_pays():
    alone = ran(SimConfig(prefill=1, decode=1), rows(40))
    assert figures(alone)["token_hit_rate"] > 0.4
    assert {job.source for job in alone.jobs[10:]} == {"local"}
    pooled = ran(SimConfig(prefill=4, decode=1, cache_blocks=0, pool_blocks=1000), rows(40))
    assert figures(pooled)["pool_fetches"] > 20
    off = ran(SimConfig(prefill=1, decode=1, cache_blocks=0), rows(40))
    assert figures(off)["token_hit_rate"] == 0.0


def test_overlap_hides_the_hand_over():
    base = {"prefill": 1, "decode": 1, "nic_gbit_s": 20.0}
    hidden, shown = (ran(SimConfig(kv_overlap=how, **base), rows(20, 500.0)) for how in ("layer", "none"))
    gap = figures(hidden)["longest_gap_s"]["mean"] / figures(shown)["longest_gap_s"]["mean"]
    assert gap < 0.9
    assert figures(hidden)["ttft_s"] == figures(shown)["ttft_s"]


def test_eight_bit_blocks_move_half_the_bytes():
    whole, half = (ran(SimConfig(prefill=1, decode=1, kv_scale=scale), rows(20)) for scale in (1.0, 0.5))
    assert half.network.bytes_moved == pytest.approx(whole.network.bytes_moved / 2)


def test_a_decode_node_that_is_full_lets_requests_wait():
    requests = [TraceRow(0.0, 512, 400, [i]) for i in range(30)]
    small = Cluster(
        SimConfig(prefill=1, decode=1, output_lengths="oracle"), MODEL.__class__(**{**_fields(), "kv_tokens": 4000})
    )
    for _ in small.run(requests):
        pass
    check(small)
    joined = sorted(job.joined for job in small.jobs)
    assert joined[-1] > joined[0] + 1.0


def test_rejection_turns_requests_away_before_their_prefill():
    burst = [TraceRow(i, 20_000, 200, list(range(i * 100, i * 100 + 40))) for i in range(300)]
    open_house, early = (ran(SimConfig(prefill=1, decode=1, rejection=how), burst) for how in ("none", "early"))
    assert figures(open_house)["refused"] == 0 < figures(early)["refused"]
    assert figures(early)["ttft_s"]["p99"] < figures(open_house)["ttft_s"]["p99"]
    assert figures(early)["goodput"] >= figures(open_house)["goodput"]
    assert all(math.isnan(job.begun) for job in early.jobs if job.refused)


def test_a_trace_written_is_the_trace_read(tmp_path):
    for name in ("t.jsonl", "t.jsonl.xz"):
        path = tmp_path / name
        assert write_trace(path, rows(5)) == 5
        assert list(read_trace(path)) == rows(5)


def _fields():
    return {name: getattr(MODEL, name) for name in MODEL.__dataclass_fields__}


def test_the_decode_node_may_look_again():
    """Prompts come at once, all decode steps of the batch they make are too slow: early lets them in, the node not."""
    many = [TraceRow(0.0, 600, 200, [k, k + 1]) for k in range(0, 400, 2)]
    limit = MODEL.decode_s(40, 40 * 700) / 0.1
    base = SimConfig(prefill=4, decode=1, rejection="early", slo_scale=100.0, tbt_slo_scale=limit)
    trusting, checked = ran(base, many), ran(replace(base, recheck=True), many)
    most = max(figures(cluster)["tbt_s"]["max"] for cluster in (trusting,)), figures(checked)["tbt_s"]["max"]
    assert most[1] < most[0]
    assert figures(checked)["wasted_prefill_tokens"] > figures(trusting)["wasted_prefill_tokens"] == 0
    check(checked)


@pytest.mark.parametrize("name", ["windserve", "ecoserve", "taichi", "mooncake-cost"])
def test_policies_by_objectives_know_those_of_the_flag(name):
    config = SimConfig(prefill=0, decode=0, mixed=2, placement=name, slo="standard:ttft=0.5,tbt=0.25")
    known = Cluster(config, MODEL).placing.policy.classes["standard"]
    assert (known.ttft_s, known.tbt_s) == (0.5, 0.25)


def test_how_busy_the_prefill_role_is():
    """Also where nodes do both or change their roles; there is no value only without any time."""
    apart = ran(SimConfig(prefill=2, decode=2), rows(60))
    found = figures(apart)
    assert found["prefill_busy"] == pytest.approx((found["busy"]["prefill-0"] + found["busy"]["prefill-1"]) / 2)
    calm, full = (figures(ran(SimConfig(prefill=0, decode=0, mixed=2), rows(60, gap_ms=gap))) for gap in (3000.0, 1.0))
    assert 0 < calm["prefill_busy"] < 0.2 < full["prefill_busy"] <= 1.0
    assert sum(calm["busy"].values()) / 2 > 2 * calm["prefill_busy"], "decodes are not prompts"
    flood = [TraceRow(10.0 * i, 16_000, 2, [100 * i + k for k in range(32)]) for i in range(150)]
    changing = ran(SimConfig(prefill=1, decode=3, role_changes=True, role_hold_s=1.0), flood)
    assert changing.roles.changes and 0 < figures(changing)["prefill_busy"] <= 1.0
    huge = TraceRow(5000.0, 2_000_000, 1, list(range(3907)))  # no node has memory for it
    refused = figures(ran(SimConfig(prefill=1, decode=1), [huge]))
    assert refused["refused"] == 1 and refused["seconds"] == 0.0 and refused["prefill_busy"] is None
    assert refused["node_hours"] == 0.0


def test_records_carry_what_the_node_has_learnt_of_noisy_steps():
    config = SimConfig(prefill=2, decode=1, step_noise=0.1)
    cluster = ran(config, rows(100))
    for node in cluster.nodes[:2]:
        told = tuple(cluster.live.prefill[:, node.index])
        assert told == pytest.approx(node.costs.prefill) and told != MODEL.prefill
        truth, guess = MODEL.prompt_s(6000, 0), node.costs.prompt_s(6000, 0)
        assert truth != guess == pytest.approx(truth, rel=0.1)
    exact = ran(SimConfig(prefill=2, decode=1, step_models="exact"), rows(100))
    assert tuple(exact.live.prefill[:, 0]) == MODEL.prefill


def test_steps_of_a_seed_vary_around_the_model():
    loud, quiet = (ran(SimConfig(**IDEAL | {"step_noise": noise}), rows(60)) for noise in (0.2, 0.0))
    apart = [a.ttft / b.ttft for a, b in zip(loud.jobs, quiet.jobs, strict=True)]
    assert len(set(apart)) > 30 and 0.9 < sum(apart) / len(apart) < 1.1

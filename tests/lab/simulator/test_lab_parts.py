"""Refusals after the prefill, learned placement, drafts, published blocks, and the time between tokens of a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.models.speculation import kept_tokens, speculating, verifying
from lab.simulator.models.step_models import PRESETS
from lab.simulator.predictors import predictors
from lab.simulator.result import figures
from sched.rejection import rejections
from tests.lab.simulator.test_cluster import check, ran, rows

MODEL = PRESETS["llama3-8b-h200"]


def long_answers(count: int = 200) -> list[TraceRow]:
    """Two decode nodes cannot keep 20 ms per token for that number of them."""
    return [TraceRow(25 * i, 4000, 400, list(range(i * 10, i * 10 + 8))) for i in range(count)]


@pytest.mark.parametrize("variant", rejections)
def test_only_the_baseline_wastes_prefills(variant):
    config = SimConfig(prefill=4, decode=1, rejection=variant, slo_scale=6.0, tbt_slo_scale=0.1)
    cluster = ran(config, long_answers())
    told = figures(cluster, 30.0, 0.01)
    assert told["finished"] + told["refused"] == told["requests"]
    assert (told["refused"] > 0) == (variant != "none")
    assert (told["wasted_prefill_tokens"] > 0) == (variant == "stage-load")
    for node in cluster.nodes:
        assert node.batch.promised_tokens == node.batch.held_tokens == node.batch.promised == 0
    if variant == "early":
        assert all(math.isnan(job.begun) for job in cluster.jobs if job.refused)


def test_the_time_per_token_has_a_scale_of_its_own():
    loose = SimConfig(prefill=4, decode=1, rejection="early", slo_scale=6.0)
    assert figures(ran(loose, long_answers()))["refused"] == 0


@pytest.mark.parametrize("predictor", predictors)
def test_learned_placement_serves_everything_and_keeps_its_guard(predictor):
    config = SimConfig(
        prefill=4, decode=2, placement="mooncake-learned", predictor=predictor, detect_s=1e9,
        faults="slow:prefill-0@0+100000x2", pool_blocks=100,
    )  # fmt: skip
    cluster = ran(config, rows(150, 20.0))
    check(cluster)
    learners = cluster.placing.acceptors.learning.values()
    assert len(learners) == 6, "each node is an acceptor"
    assert sum(one.decided for one in learners) >= 150, "once more where a prefix is being computed already"
    assert max(one.worst for one in learners) <= config.guard_slack * (1 + 1e-9)


def test_what_is_learned_is_who_is_slow():
    config = SimConfig(
        prefill=3, decode=2, placement="mooncake-learned", detect_s=1e9, faults="slow:prefill-0@0+100000x2",
        step_models="exact", cache_blocks=0,
    )  # fmt: skip
    cluster = ran(config, [TraceRow(25 * i, 6000, 5, list(range(i * 12, i * 12 + 12))) for i in range(400)])
    for policy in cluster.placing.acceptors.learning.values():
        factors = [policy.predictor.factor(f"prefill-{i}") for i in range(3)]
        assert factors[0] > 1.5 > 1.2 > max(factors[1:])


def test_wrong_predictors_are_named():
    for change in ({"predictor": "oracle"}, {"guard_slack": 0.5}, {"predictor_noise": -1.0}):
        with pytest.raises(ValueError, match="--" + next(iter(change)).replace("_", "-")):
            Cluster(SimConfig(placement="mooncake-learned", **change))


def test_published_blocks_cross_the_network_once():
    kept, published = (
        ran(SimConfig(prefill=1, decode=1, pool_blocks=1000, publish=how), rows(40)) for how in ("none", "home")
    )
    more = published.network.bytes_moved - kept.network.bytes_moved
    distinct = len({block for row in rows(40) for block in row.hash_ids[: row.input_length // 512] or row.hash_ids})
    assert 0 < more <= distinct * 512 * MODEL.token_bytes


def test_drafts_multiply_tokens_and_cost_products():
    assert kept_tokens(0, 0.5) == 1.0
    assert kept_tokens(3, 0.5) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    free, paid = speculating(MODEL, 4, 0.7), speculating(MODEL, 4, 0.7, 0.1, 0.4)
    plain = MODEL.decode_s(1, 1000)
    assert free.decode_s(1, 1000) == pytest.approx(plain / kept_tokens(4, 0.7), rel=1e-6)
    assert free.decode_s(1, 1000) < paid.decode_s(1, 1000) < plain
    assert free.prefill == paid.prefill == MODEL.prefill, "prefill nodes have no draft model"
    assert free.decode_s(256, 256) > plain / kept_tokens(4, 0.7), "a full batch is bound by products"
    with pytest.raises(ValueError, match="acceptance"):
        kept_tokens(2, 1.0)


@pytest.mark.parametrize("nodes", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "mixed": 1}])
@pytest.mark.parametrize("blocks", [0, 1000])
def test_a_decode_node_computes_the_drafts_kv_of_every_prompt(nodes, blocks):
    """Also of one whose KV the target finds."""
    config = SimConfig(**nodes, cache_blocks=blocks, step_noise=0.0)
    asked = [TraceRow(0.0, 4096, 200, list(range(8))), TraceRow(60_000.0, 4096, 200, list(range(8)))]
    kept = kept_tokens(4, 0.7)
    plain = replace(verifying(MODEL, 4, kept, 0.1, 0.4), draft_size=0.0)
    with_draft, without = (ran(config, asked, one) for one in (verifying(MODEL, 4, kept, 0.1, 0.4), plain))
    _, a1, a2 = MODEL.prefill
    draft_s = 0.1 * (a1 * 4096 + a2 * 4096**2)
    for ours, theirs in zip(with_draft.jobs, without.jobs, strict=True):
        longer = (ours.finished - ours.first_token) - (theirs.finished - theirs.first_token)
        assert longer == pytest.approx(draft_s, rel=0.03), "the KV of the first tokens of the answer is included"
        assert ours.first_token == pytest.approx(theirs.first_token)
        assert ours.prefix_tokens == theirs.prefix_tokens
    assert (with_draft.jobs[1].prefix_tokens > 0) == (blocks > 0)


def test_the_longest_tenth_of_the_gaps():
    job = Job(0, 0.0, 10, 21, (0,))
    assert math.isnan(job.tail_tbt)
    job.gaps = [(1, 0.5), (18, 0.02), (1, 0.1)]
    assert job.tail_tbt == pytest.approx((0.5 + 0.1) / 2)
    job.gaps = [(30, 0.02)]
    assert job.tail_tbt == pytest.approx(0.02)


def test_gaps_are_all_gaps():
    cluster = ran(SimConfig(prefill=2, decode=1), rows(60))
    for job in cluster.jobs:
        assert sum(count for count, _ in job.gaps) == job.output_tokens - 1
        span = sum(count * seconds for count, seconds in job.gaps)
        assert span == pytest.approx(job.finished - job.first_token, rel=0.05, abs=0.02)
        assert job.output_tokens == 1 or job.tail_tbt >= job.tbt * 0.95

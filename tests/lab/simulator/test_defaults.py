"""What nodes cannot know they do not know: lengths of answers, rates of links, what other acceptors learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import StepModel
from lab.simulator.result import figures

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 1e-2, 0.0, 0.0), token_bytes=1, kv_tokens=2000,
    chunk_tokens=1000, nic_bytes_s=1e12, nic_latency_s=1e-9,
)  # fmt: skip
BASE = SimConfig(step_models="exact", step_noise=0.0, prefill=1, decode=1, cache_blocks=0)


def long_answers(count: int = 6, output: int = 600) -> list[TraceRow]:
    return [TraceRow(10.0 * i, 300, output, [i]) for i in range(count)]


@pytest.mark.parametrize("kind", ["limit", "mean", "oracle"])
def test_only_the_oracle_is_never_preempted(kind):
    cluster = Cluster(replace(BASE, output_lengths=kind), MODEL).played(long_answers())
    found = figures(cluster)
    assert found["finished"] == 6 and found["retries"] == 0
    assert (found["preemptions"] == 0) == (kind == "oracle")
    assert all(job.resumed + job.output_tokens == 600 for job in cluster.jobs)


def test_a_preempted_request_pays_for_its_prompt_and_its_answer_again():
    """Two of 300 + 800 tokens outgrow 2,000: the later one computes 300 and what it had, at a millisecond a token."""
    first, second = Cluster(BASE, MODEL).played(long_answers(2, 800)).jobs
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.prefill == "decode-0" and second.source == "none"
    assert second.longest_gap > 0.001 * (300 + second.resumed) and second.resumed > 600
    assert first.longest_gap < 1.0 + 0.001 * 1000


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.lists(st.integers(1, 1500), min_size=1, max_size=12),
    inputs=st.integers(1, 1900),
    kind=st.sampled_from(["limit", "mean", "oracle"]),
    mixed=st.booleans(),
)
def test_everything_ends_or_is_refused_and_memory_is_given_back(outputs, inputs, kind, mixed):
    shape = {"prefill": 0, "decode": 0, "mixed": 1} if mixed else {}
    cluster = Cluster(replace(BASE, output_lengths=kind, block_tokens=16, **shape), MODEL)
    rows = [TraceRow(100.0 * i, inputs, output, [i]) for i, output in enumerate(outputs)]
    for _ in cluster.run(rows):
        pass
    assert all(
        job.refused or job.resumed + job.decoded == output for job, output in zip(cluster.jobs, outputs, strict=True)
    )
    for node in cluster.nodes:
        assert node.batch.promised_tokens == node.batch.held_tokens == node.batch.context == 0


def test_publishing_costs_bandwidth_by_default():
    rows = [TraceRow(50.0 * i, 2048, 5, [4 * i + k for k in range(4)]) for i in range(20)]
    base = replace(BASE, prefill=4, pool_blocks=100)
    roomy = replace(MODEL, kv_tokens=200_000)
    default, free = (Cluster(one, roomy).played(rows) for one in (base, replace(base, publish="none")))
    assert default.network.bytes_moved > free.network.bytes_moved


@pytest.mark.parametrize(("flag", "value"), [("output-lengths", "psychic"), ("pool-model", "best")])
def test_unknown_kinds_are_named(flag, value):
    with pytest.raises(ValueError, match=f"--{flag} must be one of"):
        Cluster(replace(BASE, **{flag.replace("-", "_"): value}), MODEL)

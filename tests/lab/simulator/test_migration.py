"""Requests that move between decode nodes: every one ends with all of its tokens, and the rules decide which moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.migration import BLOCK_TOKENS
from lab.simulator.models.step_models import StepModel
from lab.simulator.result import figures

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-5, 0.0), decode=(0.0, 0.0, 1e-2, 1e-3, 0.0), token_bytes=1000, kv_tokens=16_000,
    chunk_tokens=10_000, nic_bytes_s=1e9, nic_latency_s=1e-6,
)  # fmt: skip
"""A decode step takes 10 ms and 1 ms per request; 1,000 tokens of KV move in a millisecond."""
BASE = SimConfig(
    prefill=1,
    decode=2,
    placement="round-robin",
    step_models="exact",
    step_noise=0.0,
    intents=False,
    migration="balance",
)


def ran(config: SimConfig, rows: list[TraceRow], model: StepModel = MODEL) -> Cluster:
    cluster = Cluster(config, model)
    for _ in cluster.run(rows):
        pass
    return cluster


def ended(cluster: Cluster) -> None:
    """Nothing is left behind, also after preemptions."""
    for job in cluster.jobs:
        assert job.arrival <= job.first_token <= job.finished and job.decoded == job.output_tokens
    for node in cluster.nodes:
        assert not node.queue and not node.coming and not node.batch.running and not node.batch.joining
        assert node.batch.promised_tokens == node.batch.held_tokens == node.batch.context == 0


def uneven(count: int = 16, long: int = 600, short: int = 4) -> list[TraceRow]:
    """Every second answer, and so every one on one of two nodes in turn, is long."""
    return [TraceRow(10.0 * i, 700, long if i % 2 else short, [2 * i, 2 * i + 1]) for i in range(count)]


def test_the_busy_node_gives_to_the_idle_one():
    still, moving = (ran(replace(BASE, migration=way), uneven()) for way in ("none", "balance"))
    for cluster in (still, moving):
        ended(cluster)
        assert all(job.decoded == job.output_tokens for job in cluster.jobs)
    assert not still.migration.pauses and figures(still)["moves"] == 0
    told = figures(moving)
    assert told["moves"] == len(moving.migration.pauses) > 0 and moving.migration.begun["pressure"] == 0
    assert told["tbt_s"]["mean"] < figures(still)["tbt_s"]["mean"], "both nodes compute"
    assert {job.decode for job in moving.jobs if job.output_tokens == 600} == {"decode-0", "decode-1"}
    longest = max(moving.migration.pauses)
    assert longest < 5e-3, "only what was made during the copy of 1.3 MB follows: a token or two"
    assert told["longest_gap_s"]["max"] < figures(still)["longest_gap_s"]["max"] + longest + 0.03


def test_a_gap_spans_the_pause():
    """One request moves: the gap across the move is the pause and a step on each side at most."""
    cluster = ran(BASE, uneven())
    moved = [job for job in cluster.jobs if job.output_tokens == 600 and job.decode == "decode-0"]
    assert moved
    for job in moved:
        assert sum(count for count, _ in job.gaps) == job.output_tokens - 1, "no token is lost or counted twice"
        assert sum(count * seconds for count, seconds in job.gaps) == pytest.approx(job.finished - job.first_token)


def test_moves_under_pressure_save_preemptions():
    """Long answers that nobody foresaw fill one node, while the other has room."""
    rows = [TraceRow(10.0 * i, 700, 1200 if i % 2 else 4, [2 * i, 2 * i + 1]) for i in range(24)]
    still, moving = (ran(replace(BASE, migration=way), rows) for way in ("none", "balance"))
    for cluster in (still, moving):
        ended(cluster)
    assert figures(still)["preemptions"] > figures(moving)["preemptions"]


def test_equal_nodes_keep_their_requests():
    rows = [TraceRow(10.0 * i, 700, 200, [2 * i, 2 * i + 1]) for i in range(16)]
    cluster = ran(BASE, rows)
    assert figures(cluster)["moves"] == 0
    assert MODEL.kv_tokens % BLOCK_TOKENS == 0


def test_what_cannot_be_with_moves_is_refused():
    for other in ({"faults": "crash:decode-0@1+2"}, {"crash_every_s": 9.0}, {"role_changes": True}):
        with pytest.raises(ValueError, match="--migration balance does not work with"):
            replace(BASE, **other)
    with pytest.raises(ValueError, match="--migration balance does not work with"):
        SimConfig(prefill=2, autoscale="prefill=1..4", migration="balance")


@seed(20)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 3000), st.integers(1, 900)), min_size=1, max_size=40),
    st.integers(2, 4),
    st.sampled_from(["limit", "mean", "oracle"]),
)
def test_whatever_comes_every_request_ends_once(requests, decode, lengths):
    at, rows = 0.0, []
    for i, (gap_ms, tokens, answer) in enumerate(requests):
        at += gap_ms
        rows.append(TraceRow(at, tokens, answer, [10 * i + k for k in range(-(-tokens // 512))]))
    cluster = ran(replace(BASE, decode=decode, output_lengths=lengths), rows)
    ended(cluster)
    for job, (_, _, answer) in zip(cluster.jobs, requests, strict=True):
        assert job.resumed + job.decoded == answer
        assert sum(count for count, _ in job.gaps) == answer - 1
    assert cluster.migration.given_up <= sum(cluster.migration.begun.values())
    assert len(cluster.migration.pauses) == sum(cluster.migration.begun.values()) - cluster.migration.given_up

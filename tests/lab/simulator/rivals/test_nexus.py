"""A node whose halves share a GPU: who slows whom, and that no KV moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.loads.trace import TraceRow
from lab.simulator import making
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.result import figures
from lab.simulator.rivals.nexus import SATURATION, Halves
from lab.simulator.rivals.table import only_simulated, placements
from sched.placement import table
from tests.lab.simulator.test_cluster import check, rows
from tests.lab.simulator.test_cluster import ran as ran_8b
from tests.lab.simulator.test_node import ran

CONFIG = SimConfig(
    prefill=1, decode=1, placement="nexus", prefill_share=0.8, step_models="exact", step_noise=0.0,
    output_lengths="oracle", probe_s=0.0, cache_blocks=0,
)  # fmt: skip


class Half:
    """A half as Halves sees it."""

    def __init__(self) -> None:
        self.computing, self.disturbed = False, 0

    def disturb(self) -> None:
        self.disturbed += 1


def test_a_half_is_slow_while_the_other_one_computes():
    nodes = [Half() for _ in range(4)]
    halves = Halves(0.6, nodes, 2)
    assert [halves.slowness(i) for i in range(4)] == [1.0] * 4
    nodes[0].computing = True
    halves.changed(0)
    assert halves.slowness(2) == pytest.approx(SATURATION / 0.4) and halves.slowness(3) == 1.0
    assert [one.disturbed for one in nodes] == [0, 0, 1, 0]
    halves.changed(0)
    assert nodes[2].disturbed == 1, "nothing new"
    nodes[2].computing = True
    halves.changed(2)
    assert halves.slowness(0) == pytest.approx(1 / 0.6) and halves.slowness(1) == 1.0
    assert Halves(0.3, nodes, 2).slowness(2) == 1.0, "enough multiprocessors for decode"
    assert halves.together(0, 2) and halves.together(3, 1) and not halves.together(0, 3)


def test_without_shares_every_node_has_its_own_gpu():
    halves = Halves(0.0, [Half() for _ in range(3)], 1)
    assert halves.slowness(0) == 1.0 and not halves.together(0, 1)
    halves.changed(2)
    with pytest.raises(ValueError, match="--prefill-share"):
        Halves(0.5, [Half() for _ in range(3)], 1)
    with pytest.raises(ValueError, match="--prefill-share must be below 1"):
        SimConfig(prefill_share=1.0)


def test_a_prompt_and_a_stream_share_one_gpu():
    """A millisecond per token of a prompt, ten per decode step; 0.8 of the GPU, and 0.5 / 0.2 times as long."""
    stream, prompt = TraceRow(0.0, 10, 400, [1]), TraceRow(100.0, 1000, 1, [2, 3])
    cluster = ran(CONFIG, [stream, prompt])
    first, second = cluster.jobs
    assert second.first_token - second.arrival == pytest.approx(1.25, abs=0.03)
    assert first.finished == pytest.approx(0.01 + 399 * 0.01 + 1.25 * (1 - 1 / 2.5), abs=0.05)
    assert cluster.network.bytes_moved == 0, "one memory"
    assert [job.prefill[-2:] for job in cluster.jobs] == [job.decode[-2:] for job in cluster.jobs]
    alone = ran(CONFIG, [prompt]).jobs[0]
    assert alone.first_token - alone.arrival == pytest.approx(1.0)


def test_two_halves_cost_one_node():
    config = replace(CONFIG, prefill_cost=0.5, decode_cost=0.5)
    one = figures(ran(config, [TraceRow(0.0, 1000, 2, [1, 2])]))
    assert one["node_hours"] == pytest.approx(one["seconds"] / 3600)
    assert one["cost_per_million_tokens"] == pytest.approx(1e6 * one["node_hours"] / 1002)


@pytest.mark.parametrize("blocks", [0, 25])
def test_two_halves_have_the_memory_of_one_node(blocks):
    """Also as placement sees them."""
    base = replace(CONFIG, prefill=3, decode=3, kv_blocks=blocks, cache_blocks=1000, block_tokens=101)
    whole = Cluster(replace(base, prefill_share=0.0)).model.kv_tokens
    cluster = Cluster(base)
    by_name = cluster.by_name
    for i in range(3):
        halves = by_name[f"prefill-{i}"], by_name[f"decode-{i}"]
        assert sum(half.arena.room.tokens for half in halves) == whole
        assert abs(halves[0].arena.room.tokens - halves[1].arena.room.tokens) <= 1
        assert [half.free_tokens for half in halves] == [half.arena.room.tokens for half in halves]
        assert making.candidate(base, halves[1]).total_blocks == halves[1].arena.room.tokens // 101


def test_everything_ends():
    check(ran_8b(SimConfig(placement="nexus", prefill=3, decode=3, prefill_share=0.6), rows(80, gap_ms=5.0)))


def test_only_the_simulator_has_them():
    assert set(placements) == set(table.placements) | {"dynaserve", "nexus", "decode-in-turn", "decode-by-load"}
    assert not set(only_simulated) & set(table.placements)


def test_prefill_heavy_nodes_have_larger_chunks():
    """TaiChi: of two nodes the first one takes 500 tokens per step, the other one 100."""
    config = SimConfig(
        prefill=0, decode=0, mixed=2, batching_policy="mixed", prefill_chunk_tokens=100, heavy_chunk_tokens=500,
        placement="round-robin", step_models="exact", step_noise=0.0, probe_s=0.0, cache_blocks=0,
    )  # fmt: skip
    cluster = ran(config, [TraceRow(0.0, 1000, 1, [10 * i, 10 * i + 1]) for i in range(2)])
    assert [node.steps for node in cluster.nodes] == [2, 10]

"""Long prompts on a group of nodes in virtual time: alone they take what the formulas say; short ones get the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.simulator.models.prefill_group import ALIGN_TOKENS, WAYS, Beside, PrefillGroup
from lab.simulator.models.step_models import LLAMA3_70B, PAPER_NODE
from sched.chunks import makespan, plan, stage_seconds
from sched.stripes import stripe_sizes, stripes_s

TOKENS = 65_536
ALONE = Beside(0.0)
NO_NETWORK = replace(PAPER_NODE, nic_bytes_s=1e18, nic_latency_s=0.0)


def played(
    way: str, nodes: int, beside: Beside = ALONE, prompts: int = 1, model=NO_NETWORK, seed: int = 0
) -> PrefillGroup:
    group = PrefillGroup(model, LLAMA3_70B, way, nodes, TOKENS, beside)
    group.play(prompts, seed)
    assert len(group.ttft_s) == prompts
    return group


def test_one_node_computes_all_of_it():
    (ttft_s,) = played("one node", 4).ttft_s
    assert ttft_s == pytest.approx(PAPER_NODE.prompt_s(TOKENS, 0))
    assert all(played(way, 1).ttft_s == [pytest.approx(ttft_s)] for way in WAYS)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_alone_a_pipeline_takes_its_makespan(nodes):
    sizes = plan(TOKENS, 0, nodes, PAPER_NODE.prefill, PAPER_NODE.chunk_tokens, ALIGN_TOKENS)
    wanted = makespan(stage_seconds(sizes, 0, PAPER_NODE.prefill, 1 / nodes), nodes)
    group = played("pipeline", nodes, prompts=2)
    assert group.ttft_s[0] == pytest.approx(wanted, rel=0.01)
    assert group.ttft_s[1] == pytest.approx(group.ttft_s[0])
    assert group.waiting == 0 and group.received_bytes == TOKENS * 8192 * 2


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_alone_divided_tokens_take_what_the_plan_says(nodes):
    sizes = stripe_sizes(TOKENS, 0, nodes, 80, PAPER_NODE.prefill, PAPER_NODE.chunk_tokens, ALIGN_TOKENS)
    wanted = stripes_s(stage_seconds(sizes, 0, PAPER_NODE.prefill, 1.0), nodes, 80)
    group = played("context", nodes)
    assert group.ttft_s == [pytest.approx(wanted)]
    assert 0 < group.received_bytes < (nodes - 1) / nodes * 1.1 * TOKENS * PAPER_NODE.token_bytes


def test_a_slow_network_stretches_divided_tokens_and_hardly_a_pipeline():
    slow = replace(PAPER_NODE, nic_bytes_s=1e9)
    stretched = {way: played(way, 4, model=slow).ttft_s[0] / played(way, 4).ttft_s[0] for way in WAYS[1:]}
    assert stretched["pipeline"] < 1.2 < 1.5 < stretched["context"]
    assert played("context", 4, model=slow).waiting > 0.2 and played("pipeline", 4, model=slow).waiting == 0


@pytest.mark.parametrize("way", WAYS)
def test_short_prompts_take_turns_with_the_long_one(way):
    alone, half, full = (played(way, 4, Beside(load), model=PAPER_NODE) for load in (0.0, 0.5, None))
    assert not alone.short_ttft_s and half.short_ttft_s and len(full.short_ttft_s) > len(half.short_ttft_s)
    assert alone.ttft_s[0] <= half.ttft_s[0] < full.ttft_s[0]
    for group in (half, full):
        assert group.computing + group.waiting <= 1 + 1e-9
        assert all(ttft_s > 0 for ttft_s in group.short_ttft_s)
    assert full.computing > 0.9


@pytest.mark.parametrize("way", WAYS)
def test_every_short_prompt_that_came_before_the_end_counts(way):
    """Also those that wait then. The end itself is the first token of the last long prompt."""
    group = played(way, 2, Beside(0.9), prompts=2, model=PAPER_NODE)
    assert len(group.short_ttft_s) == group.arrived > group.left_open > 0
    assert group.open_share == group.left_open / group.arrived
    assert group.seconds == pytest.approx(sum(group.ttft_s)) and group.computing + group.waiting <= 1 + 1e-9
    fewer = played(way, 2, Beside(0.9, limit=3), prompts=2, model=PAPER_NODE)
    assert len(fewer.short_ttft_s) == fewer.arrived == 3 and fewer.open_share == 0


def test_the_same_seed_gives_the_same_run():
    runs = [played("context", 4, Beside(0.5), model=PAPER_NODE, seed=seed).short_ttft_s for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]

"""Step models with experts on ranks: the formulas by hand, what adds up, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cache.groups import PoolRule
from lab.geometry.find import architecture
from lab.geometry.published import PUBLISHED
from lab.simulator.models.by_formula import H20, HARDWARE, by_formula
from lab.simulator.models.expert_ranks import ExpertRanks, dispatch_s
from lab.simulator.models.step_models import H200, StepModel

RULE, K2 = PoolRule(state_every=8), architecture("Kimi-K2")
PLAIN = by_formula(K2, "16xh200", RULE)
EVEN = ExpertRanks(16, imbalance=1.0, link_bytes_s=1e30)


def on(ranks: ExpertRanks, hardware: str = "16xh200"):
    return by_formula(K2, hardware, RULE, ranks)


def test_even_load_and_links_that_cost_nothing_change_only_what_each_rank_has_of_the_shared_weights():
    """15 ranks more have all of them, and read them in the time in which all 16 together read 16 times as much."""
    found, weights = on(EVEN), K2.weights
    read = PLAIN.decode[0] + 15 * weights.shared * weights.shared_bytes / HARDWARE["16xh200"].hbm_bytes_s
    more = 15 * (weights.shared + weights.embedding) * weights.shared_bytes
    assert PLAIN.kv_tokens - found.kv_tokens == pytest.approx(0.9 * more / PLAIN.token_bytes, abs=1)
    assert replace(found, name=PLAIN.name, kv_tokens=PLAIN.kv_tokens) == replace(
        PLAIN,
        prefill=pytest.approx(PLAIN.prefill),
        decode=(pytest.approx(read), *(pytest.approx(part) for part in PLAIN.decode[1:])),
        expert_s=pytest.approx(PLAIN.expert_s),
    )


def test_the_way_of_a_token_by_hand():
    """60 layers with experts, rows of 7,168: 8 experts on 16 ranks are on 6.05 others than its own."""
    assert (K2.weights.experts_per_token, K2.weights.routed_elements) == (8, 60 * 7168)
    others = 15 * (1 - (15 / 16) ** 8)
    assert EVEN.others(8) == pytest.approx(others) == pytest.approx(6.05, abs=0.01)
    way = others * 60 * 7168 * 3 / (16 * 50e9)
    assert dispatch_s(K2.weights, ExpertRanks(16, imbalance=1.0)) == pytest.approx(way)
    found, busy = on(ExpertRanks(16, imbalance=1.0)), on(ExpertRanks(16, imbalance=1.5))
    assert found.prefill[1] - PLAIN.prefill[1] == pytest.approx(way)
    assert found.decode[3] - PLAIN.decode[3] == pytest.approx(way)
    assert dispatch_s(K2.weights, ExpertRanks(16, imbalance=1.5)) == pytest.approx(1.5 * way)
    assert busy.expert_s == pytest.approx(1.5 * PLAIN.expert_s)
    assert busy.read_s(0) == pytest.approx(16 * PLAIN.read_s(0)), "what all tokens use is on every rank"
    assert busy.decode_s(64, 64_000) > found.decode_s(64, 64_000) > PLAIN.decode_s(64, 64_000)


@pytest.mark.parametrize("masked", [0, 4])
@pytest.mark.parametrize("batch", [1, 16, 300, 4096])
def test_a_step_reads_the_copies_that_its_tokens_use(batch, masked):
    """Drawn: each token has 8 of 384 experts, and of each the copy on one of the two ranks that have it, if both live;
    the busiest of even ranks reads the mean. The formula has no draws."""
    rng, ranks = random.Random(batch), [set[int]() for _ in range(16)]
    for expert in range(384):
        ranks[expert % 16].add(expert)
        ranks[(expert + 1 + expert // 16 % 14) % 16].add(expert)
    living = ranks[: 16 - masked]
    homes = {e: [rank for rank, held in enumerate(living) if e in held] for e in range(384)}
    served = [e for e in homes if homes[e]]
    read, draws = 0, 5
    for _ in range(draws):
        used = set[tuple[int, int]]()
        for _ in range(batch):
            used |= {(e, rng.choice(homes[e])) for e in rng.sample(served, 8)}
        read += len(used)
    mean_s = read / draws / 384 * PLAIN.expert_s * 16 / (16 - masked)
    found = on(replace(EVEN, copies=2, masked=masked))
    assert found.read_s(batch) - found.read_s(0) == pytest.approx(mean_s, rel=0.1)


def test_copies_cost_memory_and_reads_and_lost_ranks_cost_kv_and_products():
    one, two, lost = on(EVEN), on(replace(EVEN, copies=2)), on(replace(EVEN, copies=2, masked=4))
    assert one.kv_tokens - two.kv_tokens == pytest.approx(0.9 * K2.weights.experts / PLAIN.token_bytes, abs=1)
    assert two.decode[1:] == pytest.approx(one.decode[1:])
    assert two.decode[0] - one.decode[0] == pytest.approx(one.expert_s), "all tokens together use both copies"
    assert two.read_s(1) == pytest.approx(one.read_s(1), rel=0.01), "one token uses one copy"
    assert lost.decode[0] == pytest.approx(two.decode[0]), "a rank reads what it holds"
    assert lost.kv_tokens == pytest.approx(0.75 * two.kv_tokens, abs=1)
    assert lost.prefill_s(8000, 0) - lost.prefill[0] == pytest.approx(
        (PLAIN.prefill_s(8000, 0) - PLAIN.prefill[0]) / 0.75
    )
    base = PLAIN.decode[2]

    def without_reads(model: StepModel) -> float:
        return model.decode_s(64, 64_000) - base - model.read_s(64)

    assert without_reads(lost) == pytest.approx(without_reads(PLAIN) / 0.75)
    assert lost.nic_bytes_s == 0.75 * PLAIN.nic_bytes_s


@pytest.mark.parametrize("name", [model.name for model in PUBLISHED])
def test_elements_and_experts_of_every_published_model(name):
    weights = architecture(name).weights
    assert bool(weights.experts) == bool(weights.experts_per_token) == bool(weights.routed_elements)
    if weights.experts:
        number = weights.experts_per_token / weights.expert_share
        assert number == pytest.approx(round(number))
        assert weights.experts / (3 * weights.routed_elements * number) == pytest.approx(
            round(weights.experts / (3 * weights.routed_elements * number))
        ), "the size of an expert"


def test_h20_decodes_nearly_as_fast_as_h200_and_prefills_much_slower():
    assert H20.hbm_bytes_s / H200.hbm_bytes_s == pytest.approx(4.0 / 4.8)
    assert H20.flops / H200.flops == pytest.approx(148 / 989)
    ranks = ExpertRanks(32, copies=2)
    there, here = on(ranks, "32xh20"), on(replace(ranks, ranks=16))
    assert there.prefill_s(8000, 0) > 1.5 * here.prefill_s(8000, 0), "with twice as many"
    assert there.decode_s(64, 64 * 8000) < here.decode_s(64, 64 * 8000)
    assert HARDWARE["32xh20"].memory_bytes == 32 * 96e9


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"ranks": 1}, "1 ranks cannot have"),
        ({"ranks": 4, "copies": 5}, "4 ranks cannot have 5 copies"),
        ({"ranks": 4, "masked": 4}, "and 4 masked"),
        ({"ranks": 4, "imbalance": 0.9}, "imbalance 0.9 is below 1"),
    ],
)
def test_what_fits_no_group_of_ranks_is_refused(numbers, told):
    with pytest.raises(ValueError, match=told):
        ExpertRanks(**numbers)


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit into the 1536 GB"):
        on(ExpertRanks(16, copies=2), "16xh20")
    with pytest.raises(ValueError, match="has no experts"):
        by_formula(architecture("Llama-3-70B"), "16xh200", RULE, EVEN)

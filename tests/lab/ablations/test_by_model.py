"""Ablations by model: their sentences follow the numbers; and any ablation with another model."""

from __future__ import annotations

import pytest

from lab.ablations import command as ablate
from lab.ablations.by_model import cache, network, split
from lab.ablations.by_model.sized import MODELS
from lab.ablations.common.ablation import Estimated, run
from lab.ablations.common.geometry import with_geometry
from lab.ablations.common.tables import section
from lab.ablations.simulated import ABLATIONS


def values(metric: str, numbers: dict[str, float]) -> dict[str, dict[str, Estimated]]:
    return {label: {metric: Estimated(number, 0.0)} for label, number in numbers.items()}


def splits(best: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Estimated]]:
    """Shares that are the same for the splits of `best`, and two points less for the others."""
    shares = {
        split.label(model, prefill): 0.99 - 0.02 * (prefill not in wanted)
        for model, wanted in best.items()
        for prefill in split.SPLITS
    }
    return values("effective", shares)


def test_the_sentence_about_splits_follows_the_numbers():
    said = split.reading(splits({"Llama-3-70B": (13,), "Kimi-K2": (10, 11, 12), "Qwen3-Next-80B": (14, 15)}))
    assert "Llama-3-70B 13 to 13, Kimi-K2 10 to 12, Qwen3-Next-80B 14 to 15." in said
    assert said.endswith("with Llama-3-70B, Kimi-K2 gets by with 3 fewer; Qwen3-Next-80B gets by with 1 more.")
    equal = split.reading(splits({"Llama-3-70B": (10,), "Kimi-K2": (10,), "Qwen3-Next-80B": (8, 10)}))
    assert "Kimi-K2 gets by with as many, no fewer; Qwen3-Next-80B gets by with 2 fewer." in equal


def answers(needed: dict[str, int]) -> dict[str, dict[str, Estimated]]:
    return values(
        "mean answer, s",
        {
            network.label(model, gbit): 1.0 if gbit >= least else 2.0
            for model, least in needed.items()
            for gbit in network.GBIT
        },
    )


def test_the_sentence_about_networks_follows_the_numbers():
    said = network.reading(answers({"Llama-3-70B": 400, "Kimi-K2": 100, "Qwen3-Next-80B": 800}))
    assert "Llama-3-70B 400 Gbit/s, Kimi-K2 100 Gbit/s, Qwen3-Next-80B 800 Gbit/s." in said
    assert "Kimi-K2 0.25 times and Qwen3-Next-80B 2 times that of Llama-3-70B." in said
    other = network.reading(answers({"Llama-3-70B": 100, "Kimi-K2": 1600, "Qwen3-Next-80B": 100}))
    assert "Kimi-K2 16 times and Qwen3-Next-80B 1 times" in other


def hits(enough: dict[tuple[str, int], int], most: dict[tuple[str, int], float]) -> dict[str, dict[str, Estimated]]:
    return values(
        "hit rate",
        {
            cache.label(model, every, gbytes): most[model, every] * (1.0 if gbytes >= enough[model, every] else 0.5)
            for model, every in cache.VARIANTS
            for gbytes in cache.GBYTES
        },
    )


def test_the_sentence_about_caches_follows_the_numbers():
    every = dict.fromkeys(cache.VARIANTS, 64)
    rates = dict.fromkeys(cache.VARIANTS, 0.4)
    rates["Qwen3-Next-80B", 32] = 0.3
    said = cache.reading(hits(every | {("Llama-3-70B", 8): 512, ("Qwen3-Next-80B", 1): 128}, rates))
    assert "with Llama-3-70B none below is shown to be enough, Kimi-K2 64 GB, Qwen3-Next-80B 64 GB." in said
    assert "At 64 GB, the hit rate of Qwen3-Next-80B by the distance between pooled states: 1 blocks 0.200 " in said
    assert "8 blocks 0.400 ±0.000, 32 blocks 0.300 ±0.000; 8 blocks is best." in said
    other = cache.reading(hits(every, rates | {("Qwen3-Next-80B", 1): 0.41}))
    assert "Llama-3-70B 64 GB" in other and other.endswith("; 1 blocks is best.")


def test_all_models_run_on_the_same_nodes():
    cases = [case for name in ("split", "network", "cache") for case in ABLATIONS[f"{name}-by-model"].cases(16)]
    assert {case.config.hardware for case in cases} == {"16xh200"}
    assert {case.config.prefill + case.config.decode for case in cases} == {16}
    assert {case.config.model_geometry for case in cases} == set(MODELS)
    speeds = {case.config.model_geometry: case.workload.speed for case in ABLATIONS["split-by-model"].cases(16)}
    assert speeds["Llama-3-70B"] < speeds["Kimi-K2"] < speeds["Qwen3-Next-80B"]


def test_an_ablation_with_another_model():
    ablation = with_geometry(ABLATIONS["overlap"], "Kimi-K2", "16xh200", True, 8)
    outcome = run(ablation, 16, 1, 1, lambda: None)
    assert {case.config.model_geometry for case in outcome.cases} == {"Kimi-K2"}
    text = section(outcome)
    assert "Kimi-K2 on 16xh200, by formula" in text and "paper:" not in text
    moved = [raw["bytes_moved"] for raws in outcome.raw.values() for raw in raws]
    plain = run(ABLATIONS["overlap"], 16, 1, 1, lambda: None)
    assert max(moved) < 0.25 * min(raw["bytes_moved"] for raws in plain.raw.values() for raw in raws)


@pytest.mark.parametrize("name", ["speculative", "cache-by-model"])
def test_an_ablation_that_chooses_its_models_takes_no_other(name, capsys):
    wanted = [name, "--requests", "16", "--seeds", "1", "--workers", "1", "--model-geometry", "Kimi-K2"]
    assert ablate.main(wanted) == 2
    assert f"{name} chooses its models itself" in " ".join(capsys.readouterr().err.split())


def test_goals_are_about_the_papers_model(capsys):
    with pytest.raises(SystemExit):
        ablate.main(["goals", "--model-geometry", "Kimi-K2"])
    assert "--model-geometry is for one simulated ablation" in capsys.readouterr().err

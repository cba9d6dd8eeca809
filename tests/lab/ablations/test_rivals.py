"""The table of the rivals: what it says follows from the intervals, and other numbers make other sentences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.ablations import reproduce
from lab.ablations.common.ablation import Estimated
from lab.ablations.rivals.compare import COST, GOOD, against, label, one_load, ratio, side_by_side
from lab.ablations.rivals.published import COLOCATED, CONFIGS, DEFAULT, PLAIN, RIVALS, SPLIT, SYSTEMS
from lab.ablations.rivals.table import LOADS, TABLE, cases, reading
from lab.simulator.rivals.table import placements

LOAD = next(iter(LOADS))


def values(half: float = 0.01, **goodput: float) -> dict[str, dict[str, Estimated]]:
    """Everything is 0.8, and the given goodputs; costs fall with goodput."""
    made = {}
    for load in LOADS:
        for system in CONFIGS:
            good = goodput.get(system, 0.8)
            made[label(system, load)] = {name: Estimated(0.8, half) for name in TABLE.metrics} | {
                GOOD: Estimated(good, half),
                COST: Estimated(1.0 / good, half),
            }
    return made


def test_every_case_is_a_known_policy_on_16_gpus():
    found = cases(None)
    assert len({case.label for case in found}) == len(found) == len(LOADS) * len(CONFIGS)
    for case in found:
        config = case.config
        nodes = config.prefill + config.decode + config.mixed
        assert config.placement in placements and nodes == (32 if config.prefill_share else 16)
        assert (case.ttft_slo_s, case.tbt_slo_s) == (5.0, 0.1), "the same objectives"
    assert {case.workload.requests for case in cases(50)} == {50}


def test_every_rival_names_its_source_its_figure_and_known_baselines():
    for rival in RIVALS.values():
        assert rival.source and rival.published and rival.metric in TABLE.metrics
        assert set(rival.over) <= set(CONFIGS) and rival.over
    assert DEFAULT in SYSTEMS and RIVALS.keys() >= {"dynaserve", "taichi", "nexus", "banaserve", "dopd", "windserve"}


def test_a_rival_beats_the_default_only_beyond_the_intervals():
    assert against(values(), LOAD) == {1: [], 0: list(RIVALS), -1: []}
    assert against(values(taichi=0.83, gorgo=0.75), LOAD)[1] == ["taichi"]
    assert against(values(taichi=0.83, gorgo=0.75), LOAD)[-1] == ["gorgo"]
    assert against(values(0.03, taichi=0.83), LOAD)[1] == [], "the intervals overlap"
    said = one_load(values(taichi=0.83, gorgo=0.75), LOAD)
    assert "A rival beats it: taichi (+3.0 ±1.4 points)." in said
    assert "It beats: gorgo (-5.0 ±1.4 points)." in said
    assert "Cheaper per good token: taichi." in said
    assert "A rival beats it: none." in one_load(values(), LOAD)


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_can_win(name):
    """The mutation: the same table with one better rival names it, and only it."""
    plain, better = reading(values()), reading(values(**{name: 0.95}))
    assert "A rival beats it: none." in plain and "A rival beats it: none." not in better
    assert better.count(f"A rival beats it: {name} (+15.0 ±1.4 points).") == len(LOADS)


def test_with_one_seed_nothing_is_compared():
    said = one_load(values(math.nan, taichi=0.99), LOAD)
    assert said.endswith("(one seed: no interval, so no difference is shown).") and "taichi" not in said


def test_ratios_stand_next_to_the_published_figures():
    table = values(taichi=0.88)
    table[label(SPLIT, LOAD)][GOOD] = Estimated(0.44, 0.01)
    assert ratio(table, GOOD, label("taichi", LOAD), label(SPLIT, LOAD)) == "2.00x"
    assert ratio(table, GOOD, label("nexus", LOAD), label(COLOCATED, LOAD)) == "not shown"
    table[label(SPLIT, LOAD)][GOOD] = replace(table[label(SPLIT, LOAD)][GOOD], mean=0.0)
    assert ratio(table, GOOD, label("taichi", LOAD), label(SPLIT, LOAD)) == "-"
    lines = side_by_side(values(), tuple(LOADS)).splitlines()
    assert len(lines) == 2 + sum(len(rival.over) for rival in RIVALS.values()) + len(PLAIN)
    assert len({line.count("|") for line in lines}) == 1
    for name, rival in RIVALS.items():
        assert sum(line.startswith(f"| {name} | {rival.source} | {rival.published} |") for line in lines) == len(
            rival.over
        )


@pytest.mark.parametrize("name", PLAIN)
def test_plain_baselines_stand_beside_the_rivals(name):
    config = SYSTEMS[name]
    assert config.placement in placements and replace(config, placement="mooncake") == SYSTEMS[DEFAULT]
    said = one_load(values(**{name: 0.5}), LOAD)
    assert f"{name} -30.0 points (±1.4)" in said and said.count("no difference shown") == len(PLAIN) - 1
    assert f"| {name} | a plain baseline |  | {GOOD} over {DEFAULT} | 0.62x |" in side_by_side(
        values(**{name: 0.5}), tuple(LOADS)
    )


def test_the_flag_makes_and_prints_this_table_alone(tmp_path, capsys, monkeypatch):
    few = replace(TABLE, cases=lambda requests: cases(requests)[:2], reading=lambda values: "made")
    monkeypatch.setitem(reproduce.ABLATIONS, "rivals", few)
    assert reproduce.main(["--rivals", "--quick", "--requests", "8", "--workers", "1", "--out", str(tmp_path)]) == 0
    assert "## rivals: " in capsys.readouterr().out
    assert "Ablations: rivals" in (tmp_path / "report.md").read_text()
    with pytest.raises(SystemExit):
        reproduce.main(["--rivals", "--only", "pool"])
    assert "give one of them" in capsys.readouterr().err

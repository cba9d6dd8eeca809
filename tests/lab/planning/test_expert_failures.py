"""Goodput under failures of ranks: the formula against events in virtual time, and the command."""

from __future__ import annotations

import json
import random

import pytest

from cache.groups import PoolRule
from lab.formulas.expert_failures import Decoding, Failures, goodput, tokens_s
from lab.formulas.roofs import decode_batch
from lab.geometry.find import architecture
from lab.planning import command, expert_failures
from lab.simulator.models.by_formula import by_formula
from lab.simulator.models.expert_ranks import ExpertRanks

RANKS, WANTED = 16, Decoding(context=8000, answer=500, tbt_s=0.05)


def model(copies: int, masked: int = 0, hardware: str = "16xh200", ranks: int = RANKS):
    return by_formula(architecture("Kimi-K2"), hardware, PoolRule(), ExpertRanks(ranks, copies, masked=masked))


def test_a_node_that_is_full_has_the_largest_batch_within_the_limit():
    found = model(1)
    most = decode_batch(found, WANTED.context, WANTED.tbt_s)
    assert most == found.max_batch
    assert tokens_s(found, WANTED) == pytest.approx(most / found.decode_s(most, most * WANTED.context))
    short = Decoding(8000, 500, found.decode_s(100, 800_000))
    assert tokens_s(found, short) == pytest.approx(100 / short.tbt_s)
    long = Decoding(found.kv_tokens // 3, 500, 10.0)
    assert tokens_s(found, long) == pytest.approx(3 / found.decode_s(3, 3 * long.context))
    assert tokens_s(found, Decoding(8000, 500, 1e-6)) == 0.0


def simulated(copies: int, failures: Failures, seed: int, days: float) -> float:
    """Tokens per second: ranks fail one by one, by chance; while one is away, no other fails."""
    rng, now, tokens = random.Random(seed), 0.0, 0.0
    whole = tokens_s(model(copies), WANTED)
    less = tokens_s(model(copies, 1), WANTED) if copies > 1 else 0.0
    batch = decode_batch(model(copies), WANTED.context, WANTED.tbt_s)
    lost = failures.pause_s * whole if copies > 1 else batch * WANTED.answer / 2
    while now < 86400 * days:
        well = rng.expovariate(RANKS / failures.between_s)
        tokens += well * whole - lost + failures.back_s * less
        now += well + failures.back_s
    return tokens / now


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("hours", [0.5, 5.0])
def test_the_formula_agrees_with_events(copies, hours):
    failures = Failures(3600 * hours, back_s=60.0)
    by_formula_ = goodput(model(copies), model(copies, 1) if copies > 1 else None, RANKS, failures, WANTED)
    assert by_formula_ == pytest.approx(simulated(copies, failures, 3, days=40), rel=0.02)


def test_copies_pay_where_ranks_fail_often_and_memory_does_not_bound_the_batch():
    """On 16 H200 it does. On 32 H20 the reads of two copies cost more than rare failures do."""
    kinds = (1, 0), (2, 0), (2, 1)
    one, two, less = (model(*kind, "32xh20", 32) for kind in kinds)
    full, fuller, fullest = (model(*kind) for kind in kinds)
    long = Decoding(context=60_000, answer=500, tbt_s=0.2)
    for hours, pay in ((1, True), (24, False), (1e6, False)):
        failures = Failures(3600.0 * hours, 60.0)
        gain = goodput(two, less, 32, failures, WANTED) - goodput(one, None, 32, failures, WANTED)
        assert gain > 0 if pay else gain < 0
        for wanted in (WANTED, long):
            copied = goodput(fuller, fullest, RANKS, failures, wanted)
            assert copied < goodput(full, None, RANKS, failures, wanted)


def test_the_command_writes_its_figures(tmp_path, capsys):
    out = tmp_path / "out.json"
    there = ["--hardware", "32xh20", "--expert-ranks", "32"]
    assert expert_failures.main([*there, "--between-hours", "1", "--max-batch", "768", "--json", str(out)]) == 0
    rows = {(row["case"], row["metric"]): row["ours"] for row in json.loads(out.read_text())["rows"]}
    assert rows["copies=2", "a failure per rank in 1 h"] > rows["copies=1", "a failure per rank in 1 h"]
    assert all(rows[f"copies={c}", "no failures"] > rows[f"copies={c}", "a failure per rank in 1 h"] for c in (1, 2))
    assert "Kimi-K2 on 32xh20, 32 ranks" in capsys.readouterr().out
    assert expert_failures.main(["--hardware", "16xh20"]) == 2
    assert "do not fit" in capsys.readouterr().err


def test_a_plan_with_ranks_needs_more_nodes(tmp_path, capsys):
    load = ["--prompt", "8000,1", "--answer", "500,1", "--rate", "60", "--model-geometry", "Kimi-K2"]
    found = {}
    for name, flags in {
        "even": ["--hardware", "16xh200"],
        "ranks": ["--hardware", "16xh200", "--expert-ranks", "16", "--expert-copies", "2"],
        "lost": ["--hardware", "16xh200", "--expert-ranks", "16", "--expert-copies", "2", "--masked-ranks", "4"],
        "h20": ["--hardware", "32xh20", "--expert-ranks", "32", "--expert-copies", "2"],
    }.items():
        out = tmp_path / name
        assert command.main([*load, *flags, "--json", str(out)]) == 0, capsys.readouterr()
        best = json.loads(out.read_text())["config"]["plan"]["best"]
        found[name] = best["prefill"], best["decode"]
    assert found["even"][0] < found["ranks"][0] < found["lost"][0]
    assert found["h20"][0] > 1.5 * found["ranks"][0]
    assert command.main([*load, "--hardware", "16xh200", "--expert-ranks", "16", "--masked-ranks", "1"]) == 2
    assert "does not serve" in capsys.readouterr().err
    assert command.main(["--expert-ranks", "16"]) == 2
    assert "--expert-ranks needs --model-geometry" in capsys.readouterr().err

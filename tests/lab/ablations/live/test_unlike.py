"""Slow and cheap nodes next to fast ones: prices, the share of work on fast nodes, and a short run of real nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.ablations.common.ablation import estimated
from lab.ablations.common.evidence import UNSHOWN
from lab.ablations.live.case import of_shape
from lab.ablations.live.loads import Shape
from lab.ablations.live.run import run_case
from lab.ablations.live.table import LIVE
from lab.ablations.live.throttle import ALL_FAST, Slow
from lab.ablations.live.unlike import BY_COST, BY_TIME, RANDOM, RATES, SLOW, label, on_fast, where
from lab.launch.nodes import parse_nodes
from tests.e2e.conftest import forked_nodes, tiny_model

__all__ = ["forked_nodes", "tiny_model"]


def test_slow_nodes_are_cheap_and_keep_no_steps_for_others():
    slow = Slow(("a",), 0.5, 0.25)
    assert slow.flags == {"a": ("--node-cost", "0.25", "--calibration-cache", "off")}
    assert (slow.price("a"), slow.price("b")) == (0.25, 1.0)
    assert (slow.speed_of("a"), slow.speed_of("b")) == (0.5, 1.0)
    assert ALL_FAST.flags == {}


def test_every_case_slows_one_node_of_each_role():
    cases = LIVE["unlike"].cases(None)
    assert len(cases) == 6 and all(case.slow == SLOW for case in cases)
    for case in cases:
        roles = dict(parse_nodes(case.nodes))
        assert sorted(roles[name] for name in SLOW.nodes) == ["decode", "prefill"] and len(roles) == 4
        assert case.as_dict()["slow"] == {"nodes": SLOW.nodes, "speed": SLOW.speed, "cost": SLOW.cost}
    assert "slow" not in LIVE["shifts"].cases(None)[0].as_dict()


def test_shares_on_fast_nodes_are_of_tokens():
    def summary(prefill: str, decode: str, prompt: int, answer: int) -> dict[str, object]:
        return {"nodes": {"prefill": prefill, "decode": decode}, "prompt_tokens": prompt, "output_tokens": answer}

    found = on_fast([summary("prefill-0", "decode-0", 300, 10), summary("prefill-1", "decode-1", 100, 30)])
    assert found == {"fast_prompts": 0.75, "fast_answers": 0.75}
    assert on_fast([summary("prefill-1", "decode-0", 9, 9)]) == {"fast_prompts": 0.0, "fast_answers": 0.0}


def test_clusters_of_others_are_not_slowed():
    with pytest.raises(ValueError, match="--url"):
        where(["http://x"])


def test_the_reading_follows_the_rows():
    about = LIVE["unlike"]
    values = {
        label(policy, rate): {name: estimated([0.5, 0.5, 0.5]) for name in about.metrics}
        for policy in (BY_COST, BY_TIME, RANDOM)
        for rate in RATES
    }
    assert about.reading(values).count(UNSHOWN) == 12
    busy = "cost of busy time per million good tokens"
    values[label(BY_COST, RATES[0])] |= {busy: estimated([0.25, 0.26, 0.24]), "goodput": estimated([0.4, 0.4, 0.41])}
    said = about.reading(values)
    assert said.count("-50%") == 2 and said.count("-9.7 points") == 2 and said.count(UNSHOWN) == 8


def test_four_real_nodes_two_of_them_slow(tiny_model, tmp_path):
    """Every request is answered, the slow nodes run for their share of the time, and the cost follows the prices."""
    case = LIVE["unlike"].cases(None)[0]
    work = of_shape("short", Shape((40.0, 0.3), (6.0, 0.3), shared=0.0, rate=6.0))
    found, config = run_case(replace(case, workload=work, flags=(*case.flags, *tiny_model)), 0, 1.5, tmp_path / "nodes")
    values = {name: of(found) for name, of in LIVE["unlike"].metrics.items()}
    assert found["errors"] == [] and found["finished"] == found["requests"] > 3
    assert config["placement"] == "mooncake-cost" and config["node_cost"] == 1.0
    assert values["slow nodes ran"] == pytest.approx(SLOW.speed, abs=0.1)
    assert all(0 <= values[f"{what} on fast nodes"] <= 1 for what in ("prompts", "answers"))
    if found["goodput"]:  # a busy machine may miss every objective
        hours = values["node-hours"]
        tokens = 1e6 * hours * (2 + 2 * SLOW.cost) / 4 / values["cost per million good tokens"]
        assert tokens == pytest.approx(round(tokens)) and tokens > 0
    logs = [path.read_text() for path in (tmp_path / "nodes").glob("*.log")]
    assert len(logs) == 4 and all("is up at" in text and "is down: dead" not in text for text in logs)

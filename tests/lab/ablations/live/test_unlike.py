"""Slow and cheap nodes next to fast ones: prices, the share of work on fast nodes, and a short run of real nodes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.ablations.common.ablation import estimated
from lab.ablations.common.evidence import UNSHOWN
from lab.ablations.live import throttle
from lab.ablations.live.case import of_shape
from lab.ablations.live.loads import Shape
from lab.ablations.live.play import Played
from lab.ablations.live.run import run_case, spent
from lab.ablations.live.shares import CpuShares
from lab.ablations.live.table import LIVE
from lab.ablations.live.throttle import ALL_FAST, Slow
from lab.ablations.live.unlike import BY_COST, BY_TIME, RANDOM, RATES, SLOW, label, on_fast, where
from lab.bench.common.client import Outcome
from lab.launch.cluster import StartTimeout
from lab.launch.nodes import parse_nodes
from tests.e2e.conftest import forked_nodes, tiny_model

__all__ = ["forked_nodes", "tiny_model"]


def test_slow_nodes_are_cheap_and_keep_no_steps_for_others():
    slow = Slow(("a",), 0.5, 0.25)
    assert slow.flags == {"a": ("--node-cost", "0.25", "--calibration-cache", "off")}
    assert (slow.price("a"), slow.price("b")) == (0.25, 1.0)
    assert (slow.busy_s("a", 3.0, ran=0.6), slow.busy_s("b", 3.0, ran=0.6)) == (pytest.approx(5.0), 3.0)
    assert ALL_FAST.flags == {}


def test_every_case_slows_one_node_of_each_role():
    cases = LIVE["unlike"].cases(None)
    assert len(cases) == 6 and all(case.slow == SLOW for case in cases)
    for case in cases:
        roles = dict(parse_nodes(case.nodes))
        assert sorted(roles[name] for name in SLOW.nodes) == ["decode", "prefill"] and len(roles) == 4
        assert case.as_dict()["slow"] == {"nodes": SLOW.nodes, "speed": SLOW.speed, "cost": SLOW.cost}
    assert "slow" not in LIVE["shifts"].cases(None)[0].as_dict()


def test_busy_time_of_slow_nodes_is_over_the_share_that_they_ran():
    """As measured, not as asked for."""
    case = LIVE["unlike"].cases(None)[0]
    good = Outcome(ttft_s=0.5, itl_s=[0.01], e2e_s=0.51, prompt_tokens=90, output_tokens=10, error=None)
    cpu = {"prefill-0": 0.2, "prefill-1": 0.1, "decode-0": 0.05, "decode-1": 0.0}
    found = spent(case, Played([good], 36.0, None), CpuShares(36.0, 0.1, cpu, cpu, 0.0), ran=0.4)
    busy_s = 36.0 * (0.2 + SLOW.cost * (0.1 + 0.05) / 0.4)
    assert found["busy_cost_per_million_tokens"] == pytest.approx(1e6 * busy_s / 3600 / 100)
    assert found["node_hours"] == pytest.approx(0.04)


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
    """Every request is answered, the slow nodes are stopped in between, and the cost follows the prices."""
    case = LIVE["unlike"].cases(None)[0]
    work = of_shape("short", Shape((40.0, 0.3), (6.0, 0.3), shared=0.0, rate=6.0))
    found, config = run_case(replace(case, workload=work, flags=(*case.flags, *tiny_model)), 0, 1.5, tmp_path / "nodes")
    values = {name: of(found) for name, of in LIVE["unlike"].metrics.items()}
    assert found["errors"] == [] and found["finished"] == found["requests"] > 3
    assert config["placement"] == "mooncake-cost" and config["node_cost"] == 1.0
    assert 0 < values["slow nodes ran"] < 1  # test_duty.py has the share
    assert all(0 <= values[f"{what} on fast nodes"] <= 1 for what in ("prompts", "answers"))
    if found["goodput"]:  # a busy machine may miss every objective
        hours = values["node-hours"]
        tokens = 1e6 * hours * (2 + 2 * SLOW.cost) / 4 / values["cost per million good tokens"]
        assert tokens == pytest.approx(round(tokens)) and tokens > 0
    logs = [path.read_text() for path in (tmp_path / "nodes").glob("*.log")]
    assert len(logs) == 4 and all("is up at" in text for text in logs)


class FakeChecks:
    """Nodes by URL: the checks that ended, and until the next one, at each look; the last look stays."""

    def __init__(self, **looks: list[tuple[int, float]]) -> None:
        self.looks = looks
        self.now = 0.0

    def get(self, url: str) -> dict[str, Any]:
        looks = self.looks[url.partition("/")[0]]
        done, wait_s = looks.pop(0) if len(looks) > 1 else looks[0]
        return {"engine": {"idle_checks": {"right": done, "wrong": 0, "wait_s": wait_s}}}

    def until_checked(self, monkeypatch: pytest.MonkeyPatch, *slow: str) -> float:
        """Seconds until they are checked."""

        def sleep(seconds: float) -> None:
            self.now += seconds

        monkeypatch.setattr(throttle, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=sleep))
        monkeypatch.setattr(throttle.rest, "get", self.get)
        throttle.until_checked(list(self.looks), slow)
        return self.now


@pytest.mark.parametrize(
    ("looks", "polls"),
    [
        ([(0, 4.0), (0, 4.0), (0, 0.0), (1, 9.0)], 2),  # the first check begins when the node is slow
        ([(0, 0.0), (0, 0.0), (1, 3.0), (1, 0.0), (2, 9.0)], 3),  # one runs already
        ([(2, 5.0), (2, 5.0), (3, 9.0)], 1),
    ],
)
def test_a_check_that_began_at_full_speed_does_not_count(monkeypatch, looks, polls):
    assert FakeChecks(a=looks).until_checked(monkeypatch, "a") == pytest.approx(polls * throttle.POLL_S)


def test_a_fast_node_needs_one_check_ever(monkeypatch):
    assert FakeChecks(a=[(1, 5.0)]).until_checked(monkeypatch) == 0.0


@pytest.mark.parametrize("wait_s", [0.0, 150.0])
def test_a_node_is_given_up_some_time_after_its_check_was_due(monkeypatch, wait_s):
    fakes = FakeChecks(a=[(0, wait_s)])
    with pytest.raises(StartTimeout, match="not measured its steps"):
        fakes.until_checked(monkeypatch, "a")
    assert fakes.now == pytest.approx(wait_s + throttle.CHECKED_S, abs=2 * throttle.POLL_S)

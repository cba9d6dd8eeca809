"""The ablation of long prompts: its sentences follow the numbers, and it takes no settings of a cluster."""

from __future__ import annotations

import math

import pytest

from lab.ablations import command as ablate
from lab.ablations.common.ablation import Estimated
from lab.ablations.groups import case, long_prompts
from lab.ablations.groups.case import OVERLOADED, GroupCase
from lab.ablations.groups.long_prompts import ALONE, LONG_PROMPTS, OPEN, READ, label


def table(context_s: float) -> dict[str, dict[str, Estimated]]:
    """TTFT alone of divided tokens; everything else is equal."""
    return {
        case.label: {
            name: Estimated(context_s if name == ALONE and case.way == "context" else 1.0, 0.01)
            for name in LONG_PROMPTS.metrics
        }
        for case in LONG_PROMPTS.cases(None)
    }


def test_the_sentence_follows_the_numbers():
    faster, equal = (LONG_PROMPTS.reading(table(context_s)) for context_s in (0.8, 1.0))
    assert f"{READ} nodes: 8k TTFT alone -20% (±1%)" in faster
    assert "%" not in equal.split("The paper")[0]


def test_a_run_that_leaves_short_prompts_waiting_says_so_and_tells_no_time_of_them(monkeypatch):
    """At a fifth of the nodes' time they are answered; at one and a half times of it the queue grows."""
    monkeypatch.setattr(case, "TOKENS", 65_536)
    calm, crowded = (GroupCase("c", "pipeline", 2, 32_768, load).simulate(0) for load in (0.2, 1.5))
    for found in (calm, crowded):
        assert found["requests"] == found["finished"] > 2
    assert calm["open"] < OVERLOADED < crowded["open"]
    assert calm["short_s"] > 0 and math.isnan(crowded["short_s"]) and math.isnan(crowded["short_p99_s"])
    values = table(1.0)
    for number, of in enumerate(values.values()):
        of[OPEN] = Estimated(0.4 if number == 1 else 0.0, 0.01)
    said = LONG_PROMPTS.reading(values).split("Overloaded")
    assert f'"{list(values)[1]}".' in said[1] and f'"{list(values)[2]}"' not in said[1]


def test_one_node_is_one_case_per_length():
    labels = [case.label for case in LONG_PROMPTS.cases(None)]
    assert labels.count(label(8, 1, "one node")) == 1 and label(8, 1, "context") not in labels
    assert label(1024, 8, "context") in labels and label(128, READ, "pipeline", long_prompts.SLOW_GBIT) in labels


@pytest.mark.parametrize("flags", [["--placement", "random"], ["--model-geometry", "Kimi-K2"]])
def test_settings_of_a_cluster_are_refused(flags, capsys):
    assert ablate.main(["long-prompts", *flags, "--requests", "10", "--seeds", "1"]) == 2
    assert "long-prompts" in capsys.readouterr().err

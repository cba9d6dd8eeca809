"""Sentences follow from tables: other numbers make other sentences, and noise makes none."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest

from lab.ablations.common.ablation import Estimated
from lab.ablations.common.evidence import relative, saturation, sign
from lab.ablations.simulated import ABLATIONS, bandwidth, overload


def table(name: str, value=lambda case, metric: 1.0 + 0.37 * case + 0.11 * metric, half: float = 1e-3):
    """Made-up values of every case and metric of an ablation."""
    ablation = ABLATIONS[name]
    return {
        case.label: {metric: Estimated(value(i, j), half) for j, metric in enumerate(ablation.metrics)}
        for i, case in enumerate(ablation.cases(100))
    }


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_reading_changes_with_its_data(name):
    reading = ABLATIONS[name].reading
    said = reading(table(name))
    assert reading(table(name)) == said
    assert reading(table(name, lambda case, metric: 9.0 - 0.017 * case * case + 0.3 * metric)) != said


def test_a_difference_is_shown_only_beyond_its_interval():
    values = {"a": {"x": Estimated(1.0, 0.3)}, "b": {"x": Estimated(1.4, 0.3)}, "c": {"x": Estimated(2.0, 0.3)}}
    values |= {"one seed": {"x": Estimated(9.0, math.nan)}, "none": {"x": Estimated(math.nan, math.nan)}}
    assert [sign(values, "x", case, "a") for case in values] == [0, 0, 1, 0, 0]
    assert sign(values, "x", "a", "c") == -1
    assert relative(values, "x", "b", "a") == "no change" and relative(values, "x", "c", "a") == "+100% (±42%)"


def test_a_saturated_baseline_is_named():
    values = {"base": {"prefill utilisation": Estimated(0.97, 0.01)}}
    assert '"base" is saturated (97% busy)' in saturation(values, "base")
    values["base"]["prefill utilisation"] = Estimated(0.9, 0.01)
    assert saturation(values, "base") == ""


def speeds(half: float = 0.05):
    values = {f"{gbit} Gbit/s": [3.0 - 0.2 * i, 0.1 * i] for i, gbit in enumerate(bandwidth.GBIT)}
    values["recompute"] = [2.9, 0.0]
    names = ("mean TTFT, s", "hit rate", "prefill utilisation")
    return {
        case: {name: Estimated(value, min(half, 0.02) if name == "hit rate" else half)
               for name, value in zip(names, [*pair, 0.5], strict=True)}
        for case, pair in values.items()
    }  # fmt: skip


def test_reuse_pays_where_the_intervals_say_so():
    read = ABLATIONS["bandwidth"].reading
    assert "pays from 10 Gbit/s on" in read(speeds())
    assert "at none of these rates" in read(speeds(half=3.0)), "the intervals overlap"
    none = deepcopy(speeds())
    for case in none.values():
        case["hit rate"] = Estimated(0.0, 0.0)
    assert "at none of these rates" in read(none), "nothing was reused"
    dip = deepcopy(speeds())
    dip["80 Gbit/s"]["mean TTFT, s"] = replace(dip["80 Gbit/s"]["mean TTFT, s"], mean=5.0)
    assert "pays from 160 Gbit/s on" in read(dip), "at 80 it did not"


def test_early_rejection_is_reproduced_only_where_it_acts():
    values = table("overload", lambda case, metric: 100.0)
    said = ABLATIONS["overload"].reading(values)
    assert said.count("is not reproduced at any of these loads") == 2 and "early no change" in said
    values[f"early rejection, {overload.BOTH}"]["refused"] = Estimated(80.0, 1.0)
    said = ABLATIONS["overload"].reading(values)
    assert f'"early rejection" is reproduced: {overload.BOTH}.' in said and "early -20% (±1%)" in said
    values[f"early rejection, {overload.BOTH}"]["good requests/s"] = Estimated(50.0, 1.0)
    assert '"early rejection" is not reproduced' in ABLATIONS["overload"].reading(values), "it loses good requests"

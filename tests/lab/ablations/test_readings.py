"""Sentences follow from tables: other numbers make other sentences, and noise makes none."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lab.ablations.common.ablation import Estimated, estimated
from lab.ablations.common.evidence import (
    BUSY,
    UNSHOWN,
    best_of,
    compared,
    in_order,
    leaders,
    near_from,
    points,
    quotient,
    relative,
    saturated,
    sign,
    told,
    weighted,
)
from lab.ablations.common.goals import at_most
from lab.ablations.common.tables import goal_table
from lab.ablations.live.table import LIVE
from lab.ablations.simulated import ABLATIONS, bandwidth, learned, overload, shifts

READ = {**ABLATIONS, **{f"{name}, live": one for name, one in LIVE.items()}}
NUMBER = r"[-+]?[\d.]+(?:e[-+]?\d+)?%?"
VALUE = re.compile(rf"{NUMBER} ±{NUMBER}")
"""A mean with its interval, as `told` writes it: it claims no difference."""

Table = dict[str, dict[str, Estimated]]


def claims(text: str) -> str:
    """What a reading says beyond the values that it quotes."""
    return VALUE.sub("#", text)


def wordings(text: str) -> str:
    """The same for one seed, whose values have no interval."""
    return re.sub(NUMBER, "#", text)


def table(name: str, value=lambda case, metric: 1.0 + 0.37 * case + 0.11 * metric, half: float = 1e-3) -> Table:
    """Made-up values of every case and metric of an ablation; no case is saturated."""
    ablation = READ[name]
    return {
        case.label: {
            metric: Estimated(0.5 if metric == BUSY else value(i, j), half) for j, metric in enumerate(ablation.metrics)
        }
        for i, case in enumerate(ablation.cases(100))
    }


@st.composite
def tables(draw: Any, name: str) -> Table:
    """Every metric grows from case to case, by steps far above the intervals."""
    cases, metrics = len(READ[name].cases(100)), len(READ[name].metrics)
    steps = draw(st.lists(st.integers(5, 40), min_size=8, max_size=8))
    columns = [
        [0.2 + 0.01 * sum(steps[(k * (j + 1)) % 8] for k in range(i)) for i in range(cases)] for j in range(metrics)
    ]
    return table(name, lambda case, metric: columns[metric][case])


def negated(values: Table) -> Table:
    """Every difference between two cases has the other sign."""
    made: Table = {case: {} for case in values}
    for metric in next(iter(values.values())):
        column = [of[metric].mean for of in values.values()]
        for case, of in values.items():
            made[case][metric] = replace(of[metric], mean=min(column) + max(column) - of[metric].mean)
    return made


def shuffled(values: Table, order: list[int]) -> Table:
    """The values of other cases."""
    rows = list(values.values())
    return {case: rows[place] for case, place in zip(values, order, strict=True)}


def with_intervals(values: Table, half: float) -> Table:
    return {case: {metric: replace(found, half=half) for metric, found in of.items()} for case, of in values.items()}


@pytest.mark.parametrize("name", READ)
@seed(21)
@settings(max_examples=15)
@given(data=st.data())
def test_a_reading_changes_with_its_data_and_claims_nothing_from_noise(name, data):
    """Negated data changes what is claimed. Where no interval separates two cases, or there is one seed, the claims are
    the same for every exchange of the data: none of them comes from the means."""
    reading, values = READ[name].reading, data.draw(tables(name))
    assert claims(reading(negated(values))) != claims(reading(values))
    order = data.draw(st.permutations(range(len(values))))
    for half, words in ((1e6, claims), (math.nan, wordings)):
        noise = with_intervals(values, half)
        said = words(reading(noise))
        assert "shown" in said
        assert words(reading(negated(noise))) == said
        assert words(reading(shuffled(noise, order))) == said


def pair(ours: list[float], theirs: list[float]) -> Table:
    return {"ours": {"x": estimated(ours)}, "theirs": {"x": estimated(theirs)}}


def test_runs_of_the_same_seeds_are_compared_seed_by_seed():
    values = pair([1.1, 2.1, 3.1], [1.0, 2.0, 3.0])
    assert sign(values, "x", "ours", "theirs") == 1, "the seeds differ more than the cases, but alike"
    alone = {case: {"x": replace(of["x"], samples=())} for case, of in values.items()}
    assert sign(alone, "x", "ours", "theirs") == 0
    assert sign(pair([3.1, 1.1, 2.1], [1.0, 2.0, 3.0]), "x", "ours", "theirs") == 0, "the seeds were exchanged"
    assert quotient(values["theirs"]["x"], values["theirs"]["x"]) == Estimated(1.0, 0.0)
    assert weighted((2.0, Estimated(1.0, 0.3)), (-1.0, Estimated(1.0, 0.8))) == Estimated(1.0, 1.0)
    assert quotient(Estimated(4.0, 0.4), Estimated(2.0, 0.0)) == Estimated(2.0, pytest.approx(0.2))


def test_a_difference_is_shown_only_beyond_its_interval():
    values = {"a": {"x": Estimated(1.0, 0.3)}, "b": {"x": Estimated(1.4, 0.3)}, "c": {"x": Estimated(2.0, 0.3)}}
    assert leaders(values, "x", ["a", "b", "c"]) == ["c"] and leaders(values, "x", ["a", "b"], most=False) == ["a", "b"]
    assert best_of(values, "x", {"a": "A", "b": "B"}) == "no one is shown to be best"
    assert best_of(values, "x", {"a": "A", "b": "B", "c": "C"}, most=False) == f"A and B are best, {UNSHOWN}"
    assert compared(values, "x", "c", {"a": "A", "b": "B"}) == "above all others"
    assert compared(values, "x", "b", {"a": "A", "c": "C"}) == "below C and not shown to differ from A"
    assert [in_order(values, "x", list(cases)) for cases in ("ca", "ba", "ac")] == [
        "shown",
        "not shown",
        "contradicted",
    ]
    values |= {"one seed": {"x": Estimated(9.0, math.nan)}, "none": {"x": Estimated(math.nan, math.nan)}}
    assert [sign(values, "x", case, "a") for case in values] == [0, 0, 1, 0, 0]
    assert sign(values, "x", "a", "c") == -1
    assert relative(values, "x", "b", "a") == UNSHOWN and relative(values, "x", "c", "a") == "+100% (±42%)"
    assert points(values, "x", "c", "a") == "+100.0 points (±42.4)"
    assert [told(values[case]["x"], ".1f", " s") for case in ("a", "one seed", "none")] == [
        "1.0 ±0.3 s", "9.0 s", "no value",
    ]  # fmt: skip


def test_a_size_is_enough_only_if_all_larger_ones_are_shown_to_be():
    def costs(half: float, *means: float) -> Table:
        return {str(size): {"x": Estimated(mean, half)} for size, mean in zip((1, 2, 4, 8), means, strict=True)}

    assert near_from(costs(0.0, 1.05, 3.0, 1.05, 1.0), "x", list("1248"), 1.1) == "4", "one lucky size is not enough"
    assert near_from(costs(0.0, 4.0, 3.0, 2.0, 1.0), "x", list("1248"), 1.1) == "8"
    assert near_from(costs(0.2, 1.0, 1.0, 1.0, 1.0), "x", list("1248"), 1.1) == "8", "not shown"
    assert near_from(costs(0.0, 0.39, 0.1, 0.37, 0.4), "x", list("1248"), 0.9) == "4"


def test_a_goal_is_met_by_the_whole_interval():
    found = [at_most("few", "<= 5 s", Estimated(4.0, half), 5.0, ".1f", " s") for half in (0.5, 2.0, math.nan)]
    found.append(at_most("few", "<= 5 s", Estimated(8.0, 2.0), 5.0, ".1f", " s"))
    assert [goal.met for goal in found] == [True, None, True, False]
    assert "| few | <= 5 s | 4.0 ±2.0 s | open |" in goal_table(found) and "| NOT met |" in goal_table(found)
    values = table("shifts", lambda case, metric: 100.0)
    assert {goal.met for goal in shifts.goals(values)} == {True, False}
    assert None in {goal.met for goal in shifts.goals(with_intervals(values, 60.0))}


def test_the_bound_of_the_guard_holds_in_every_run():
    name = "chosen / least estimate, most"

    def goal(*runs: float):
        values = table("learned", lambda case, metric: 1.0)
        values[learned.GUARDED[1]][name] = estimated(runs)
        return learned.goals(values)[0]

    assert goal(1.1, 1.2, learned.BOUND).met and goal(1.1, 1.2, learned.BOUND).ours == f"{learned.BOUND:.3f}"
    assert goal(1.0, 1.0, learned.BOUND + 0.01).met is False, "one run breaks it, and the mean does not"
    missing = goal(1.0, math.nan, 1.0)
    assert missing.met is False and missing.ours == "no value"


def test_a_saturated_case_is_named():
    values = table("scheduling")
    assert "Saturated" not in ABLATIONS["scheduling"].reading(values)
    values["random"][BUSY] = Estimated(0.97, 0.01)
    assert ABLATIONS["scheduling"].reading(values).endswith('the length of the run: "random".')
    assert saturated({"mixed": {BUSY: Estimated(math.nan, math.nan)}}) == ""


def speeds(half: float = 0.05):
    values = {f"{gbit} Gbit/s": [3.0 - 0.2 * i, 0.1 * i] for i, gbit in enumerate(bandwidth.GBIT)}
    values["recompute"] = [2.9, 0.0]
    names = ("mean TTFT, s", "hit rate", BUSY)
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
    assert said.count("is not reproduced at any of these loads") == 2 and f"early {UNSHOWN}" in said
    values[f"early rejection, {overload.BOTH}"]["refused"] = Estimated(80.0, 1.0)
    said = ABLATIONS["overload"].reading(values)
    assert f'"early rejection" is reproduced: {overload.BOTH}.' in said and "early -20% (±1%)" in said
    values[f"early rejection, {overload.BOTH}"]["good requests/s"] = Estimated(50.0, 1.0)
    assert '"early rejection" is not reproduced' in ABLATIONS["overload"].reading(values), "it loses good requests"

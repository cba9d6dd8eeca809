"""Placement by cost: the cheapest node that meets the objective, else the fastest; a token costs 1 ms to prefill."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.classes import CLASSES
from sched.placement.cheapest import CHEAP_RATIO, HEADROOM, CheapestPlacement
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import prefill_costs
from sched.placement.demand import Demand
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, Node, decide, demand, node

STANDARD = CLASSES["standard"]


def by_cost(prices: Mapping[str, float]) -> CheapestPlacement:
    return CheapestPlacement(Limits(), random.Random(0), price=prices.__getitem__)


def placed(prices: Mapping[str, float], nodes: list[Node], wanted: Demand | None = None) -> Placement:
    found = decide(by_cost(prices), wanted or demand(), nodes)
    assert isinstance(found, Placement), found
    return found


def slow(name: str, **known) -> Node:
    """Half as fast as the others."""
    return node(name, **{"prefill": (0.0, 2e-3, 0.0), "step_s": 0.04} | known)


def test_the_cheap_node_is_chosen_while_it_meets_the_objective():
    prices = {"dear": 1.0, "cheap": 0.3}
    found = placed(prices, [node("dear"), slow("cheap")])
    assert (found.prefill, found.decode) == ("cheap", "cheap")
    late = HEADROOM * STANDARD.ttft_s - 3.0  # it needs 3.2 s for the prompt
    assert placed(prices, [node("dear"), slow("cheap", wait_s=late)]).prefill == "dear"
    assert placed(prices, [node("dear"), slow("cheap", step_s=0.09)]).decode == "dear"


def test_slow_and_cheap_may_cost_more_than_fast_and_dear():
    found = placed({"dear": 1.0, "cheap": 0.7}, [node("dear"), slow("cheap")])
    assert (found.prefill, found.decode) == ("dear", "dear")


def test_if_none_meets_the_objective_the_fastest_is_chosen():
    nodes = [node("dear", wait_s=9.0, step_s=0.3), slow("cheap", wait_s=9.0, step_s=0.4)]
    found = placed({"dear": 1.0, "cheap": 0.1}, nodes)
    assert (found.prefill, found.decode) == ("dear", "dear")


def test_of_equally_cheap_nodes_the_faster_one_is_chosen():
    nodes = [node("a", wait_s=1.0, running=3, step_s=0.021), node("b")]
    found = placed({"a": 1.0, "b": 1.0}, nodes)
    assert (found.prefill, found.decode) == ("b", "b")


def test_a_prefix_makes_a_node_cheaper():
    nodes = [node("dear", local_tokens=1600), slow("cheap")]
    assert placed({"dear": 1.0, "cheap": 0.3}, nodes).prefill == "dear"


def test_rows_show_price_and_cost():
    found = placed({"dear": 3600.0, "cheap": 36.0}, [node("dear"), slow("cheap")])
    rows = {(row["stage"], row["node"]): row for row in found.considered}
    dear = rows["prefill", "dear"]
    assert dear["node_cost"] == 3600.0 and abs(dear["cost"] - dear["prefill_s"]) < 1e-9
    cheap = rows["decode", "cheap"]
    assert cheap["node_cost"] == 36.0 and abs(cheap["cost"] - 100 * 0.04 / 100) < 1e-9


def test_the_shortlist_has_cheap_nodes_that_are_not_among_the_fastest():
    nodes = [node(f"dear-{i}") for i in range(8)] + [slow(f"cheap-{i}") for i in range(4)]
    prices = {one.node_id: 0.3 if one.node_id.startswith("cheap") else 1.0 for one, _ in nodes}
    policy = by_cost(prices)
    view = View(NOW, [one for one, _ in nodes], FAST, 256)
    asked = {view.ids[i] for i in policy.shortlist(NOW, demand(), view, view.none)}
    assert {name for name in prices if name.startswith("cheap")} <= asked
    assert any(name.startswith("dear") for name in asked), "for the case that the cheap ones are busy"


NODES = st.lists(
    st.tuples(st.floats(0, 9), st.floats(1e-4, 1e-2), st.floats(0.001, 0.3), st.floats(0.01, 10), st.integers(0, 1600)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(NODES)
def test_the_choice_meets_the_objective_if_any_node_does_and_is_cheap(known):
    nodes, prices = [], {}
    for i, (wait, token, step, price, local) in enumerate(known):
        nodes.append(node(f"n{i}", wait_s=wait, prefill=(0.0, token, 0.0), step_s=step, local_tokens=local))
        prices[f"n{i}"] = price
    found = decide(by_cost(prices), demand(), nodes)
    assert not isinstance(found, Rejected)
    view = View(NOW, [one for one, _ in nodes], FAST, 256)
    costs = prefill_costs(NOW, demand(), view, np.array([float(local) for _, local in nodes]), 1.5)
    ttft = dict(zip(view.ids, costs.ttft_s.tolist(), strict=True))
    money = {name: prices[name] * seconds for name, seconds in zip(view.ids, costs.own_s.tolist(), strict=True)}
    meets = [name for name, seconds in ttft.items() if seconds <= HEADROOM * STANDARD.ttft_s]
    if meets:
        assert found.prefill in meets
        assert money[found.prefill] <= CHEAP_RATIO * min(money[name] for name in meets) * (1 + 1e-9)
    else:
        assert ttft[found.prefill] == min(ttft.values())

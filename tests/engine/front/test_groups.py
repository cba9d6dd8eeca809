"""When an acceptor gives a long prompt to several prefill nodes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config.config import Config
from engine.front.groups import GroupRules
from engine.front.placed import Placed
from engine.front.placement_policy import placement_policy
from engine.observe.explain import table
from engine.observe.timeline import Timeline
from sched.placement.burst import Choice
from sched.placement.choice import Placement
from sched.placement.demand import Demand
from sched.placement.groups.context import context
from sched.placement.groups.pipeline import pipeline
from sched.placement.links import Links
from sched.placement.view import Candidate, View
from tests.engine.front.test_placing import MeasuredLinks, accepted
from tests.sched.placement.test_placement import FlatLinks

LIMITS: dict[str, Any] = {"min_tokens": 4000, "max_nodes": 3, "min_gain": 0.1, "num_layers": 30, "chunk_tokens": 512}
RULES = GroupRules(divide=pipeline, hop_bytes=1152, **LIMITS)
BY_TOKENS = GroupRules(divide=context, hop_bytes=768, **LIMITS)
PREFILL, DECODE = ("prefill",), ("decode",)


def node(name: str, roles: tuple[str, ...] = PREFILL, **known: Any) -> Candidate:
    usual = {"prefill": (0.002, 1e-3, 1e-8), "free_blocks": 1000, "total_blocks": 1000, "step_s": 0.02}
    return Candidate(node_id=name, roles=roles, **(usual | known))


def placed(
    nodes: list[Candidate],
    tokens: int = 8000,
    pool: int = 0,
    gossip: list[Candidate] | None = None,
    avoid: Any = (),
    links: Links | None = None,
    rules: GroupRules = RULES,
) -> Placement:
    """gossip: nodes that nobody asked."""
    links = links or MeasuredLinks()
    demand = Demand(
        num_tokens=tokens, max_tokens=16, pool_tokens=pool, block_size=16, handover_token_bytes=23040,
        fetch_token_bytes=23040,
    )  # fmt: skip
    view = View(0.0, nodes, links, 256)
    known = SimpleNamespace(view=View(0.0, [*nodes, *(gossip or [])], links, 256))
    policy = placement_policy(Config(), random.Random(0))
    choice = Choice(policy, 0.0, demand, view, np.zeros(len(nodes)), avoid)
    decision = accepted(choice.decide())
    return rules.grouped(decision, choice, known, fetches=True)  # type: ignore[arg-type]


def test_idle_nodes_form_a_group_with_the_chosen_one_first():
    found = placed([node("a"), node("b"), node("c", wait_s=0.1), node("d", DECODE)])
    assert found.group is not None and found.prefill == found.group.nodes[0]
    assert set(found.prefills) == {"a", "b", "c"} and found.decode == "d"
    assert found.estimates["ttft_s"] == pytest.approx(found.group.ready_s + found.estimates["transfer_s"])
    assert found.estimates["prefill_s"] < 0.5 * 8.7


def test_a_node_known_only_by_gossip_joins():
    found = placed([node("a"), node("d", DECODE)], gossip=[node("far")])
    assert found.prefills == ("a", "far")


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a"), node("d", DECODE)],  # no other
        [node("a"), node("b", wait_s=30.0), node("d", DECODE)],  # busy
        [node("a"), node("b", free_blocks=100), node("d", DECODE)],  # no room for the prompt
        [node("a"), node("d", (*PREFILL, *DECODE), wait_s=5.0)],  # the decode node is no stage
        [node("a"), node("b", stages=False), node("d", DECODE)],  # its ranks compute all layers
    ],
)
def test_one_node_computes_it_if_nobody_can_help(nodes):
    assert placed(nodes).group is None


def test_what_is_short_or_known_needs_no_group():
    nodes = [node("a"), node("b"), node("d", DECODE)]
    assert placed(nodes, tokens=3000).group is None
    assert placed(nodes, tokens=8000).group is not None
    assert placed(nodes, tokens=8000, pool=6400).group is None


def test_a_node_that_sent_the_prompt_away_is_no_stage():
    found = placed([node("a"), node("b"), node("c"), node("d", DECODE)], avoid=("b",))
    assert "b" not in found.prefills and len(found.prefills) == 2


def test_others_form_a_group_if_the_chosen_node_can_be_no_stage():
    found = placed([node("a", stages=False), node("b", wait_s=0.01), node("d", DECODE)], gossip=[node("c")])
    assert set(found.prefills) == {"b", "c"}


def test_mixed_nodes_help_and_one_of_them_decodes():
    both = (*PREFILL, *DECODE)
    found = placed([node("a", both), node("b", both), node("c", both)])
    assert found.group is not None and found.decode not in found.prefills and len(found.prefills) == 2


def test_a_group_may_divide_the_tokens():
    found = placed([node("a"), node("b"), node("d", DECODE)], rules=BY_TOKENS)
    assert found.group is not None and set(found.prefills) == {"a", "b"} and found.group.cuts == ()
    assert 4.3 < found.estimates["prefill_s"] < 0.6 * 8.7
    timeline = Timeline("r", 8000)
    timeline.decisions.append(Placed(found, [], 3, 0.001))
    timeline.nodes |= {"acceptor": "d", "prefill": "a", "decode": "d"}
    detail = {"index": 0, "nodes": ["a", "b"], "tokens": 4000, "prefix_tokens": 0, "chunks": 8, "pauses": 2}
    timeline.add(1.0, "a", "stage", **detail, compute_s=4.1, waited_s=0.25, seconds=4.5, sent_bytes=92160000)
    shown = table(timeline.as_dict())
    assert f"computed by a group of 2: {', '.join(found.prefills)}, each with some of the tokens" in shown
    assert "4000 tokens" in shown and "0.25" in shown and "92160000" in shown.replace(",", "")


def test_explain_shows_the_group_and_its_stages():
    found = placed([node("a"), node("b", wait_s=0.01), node("d", DECODE)])
    timeline = Timeline("r", 8000)
    timeline.decisions.append(Placed(found, [], 3, 0.001))
    timeline.nodes |= {"acceptor": "d", "prefill": "a", "decode": "d"}
    for i, name in enumerate(found.prefills):
        detail = {"index": i, "nodes": list(found.prefills), "layers": [15 * i, 15 * i + 15], "prefix_tokens": 0}
        detail |= {"chunks": 16, "pauses": 0, "compute_s": 4.1, "seconds": 4.5, "sent_bytes": 9216000 * (1 - i)}
        timeline.add(1.0 + i, name, "stage", **detail)
    shown = table(timeline.as_dict())
    assert "computed by a group of 2: a (layers 0 to 14), b (layers 15 to 29)" in shown
    assert "0 on a" in shown and "1 on b" in shown and "9216000" in shown.replace(",", "")


@pytest.mark.parametrize(("bytes_s", "source", "prefix"), [(1e9, "pool", 1600), (1e6, "none", 0)])
def test_a_group_fetches_only_what_it_cannot_compute_sooner(bytes_s, source, prefix):
    """1,600 tokens are 37 MB and computed in 1.6 s."""
    found = placed([node("a"), node("b"), node("d", DECODE)], pool=1600, links=FlatLinks(bytes_s))
    assert found.group is not None and (found.prefix_source, found.prefix_tokens) == (source, prefix)
    assert found.estimates["transfer_s"] == pytest.approx(prefix * 23040 / bytes_s)
    assert found.estimates["ttft_s"] == pytest.approx(found.group.ready_s + found.estimates["transfer_s"])

"""Algorithm 1 by hand-made cases: a token costs 1 ms to prefill, a KV token is 1,000 bytes."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.admission import Limits
from sched.placement.choice import Placement, Rejected
from sched.placement.demand import Demand
from sched.placement.links import Lines, Paths
from sched.placement.mooncake import MooncakePlacement
from sched.placement.rivals import RandomPlacement
from sched.placement.table import placements
from sched.placement.two_stages import TwoStages
from sched.placement.view import Candidate, View

MIXED = ("prefill", "decode", "store")


class FlatLinks:
    """Every path moves `bytes_per_s`."""

    places: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        self.bytes_per_s = bytes_per_s

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return np.zeros(len(nodes)), np.full(len(nodes), 1 / self.bytes_per_s)

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return self.fetch(nodes)

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return array("d", (0.0, 1 / self.bytes_per_s)) * len(nodes)

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return self.fetch_each(nodes)


NO_LIMITS = Limits()
FAST, SLOW = FlatLinks(1e9), FlatLinks(1e5)  # 1 us and 10 ms per token


NOW = 1000.0
Node = tuple[Candidate, int]
"""And the tokens of the prompt that it has."""


def node(node_id: str, roles: tuple[str, ...] = MIXED, local_tokens: int = 0, **known: Any) -> Node:
    defaults = {"prefill": (0.0, 1e-3, 0.0), "free_blocks": 1000, "total_blocks": 1000, "step_s": 0.02}
    return Candidate(node_id=node_id, roles=roles, **(defaults | known)), local_tokens // 16 * 16


def changed(known: Node, **values: Any) -> Node:
    return replace(known[0], **values), known[1]


def decide(
    policy: TwoStages, wanted: Demand, nodes: Sequence[Node], links: FlatLinks | None = None
) -> Placement | Rejected:
    view = View(NOW, [candidate for candidate, _ in nodes], links or FAST, policy.limits.max_waiting)
    return policy.place(NOW, wanted, view, np.array([float(min(local, wanted.usable_tokens)) for _, local in nodes]))


def demand(num_tokens: int = 1601, pool_tokens: int = 0, max_tokens: int = 100) -> Demand:
    return Demand(
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        pool_tokens=pool_tokens,
        block_size=16,
        handover_token_bytes=1000,
        fetch_token_bytes=1000,
    )


def place(
    wanted: Demand, nodes: list[Node], links: FlatLinks = FAST, limits: Limits = NO_LIMITS, threshold: float = 1.5
) -> Placement:
    placed = decide(MooncakePlacement(limits, random.Random(0), threshold), wanted, nodes, links)
    assert isinstance(placed, Placement), placed
    return placed


def refuse(wanted: Demand, nodes: list[Node], limits: Limits = NO_LIMITS) -> Rejected:
    refused = decide(MooncakePlacement(limits, random.Random(0)), wanted, nodes)
    assert isinstance(refused, Rejected), refused
    return refused


def test_the_node_that_has_the_prefix_is_preferred_when_queues_are_equal():
    placed = place(demand(), [node("a", wait_s=0.1), node("b", wait_s=0.1, local_tokens=1600), node("c", wait_s=0.1)])
    assert (placed.prefill, placed.prefix_source, placed.prefix_tokens) == ("b", "local", 1600)
    assert placed.estimates["ttft_s"] == pytest.approx(0.1 + 0.001)


def test_a_long_queue_outweighs_the_cached_prefix():
    placed = place(demand(), [node("a"), node("b", wait_s=5.0, local_tokens=1600)])
    assert (placed.prefill, placed.prefix_source, placed.prefix_tokens) == ("a", "none", 0)
    assert placed.estimates["ttft_s"] == pytest.approx(1.601)


def test_the_prefix_is_fetched_from_the_pool_when_that_is_cheaper_than_computing_it():
    placed = place(demand(pool_tokens=1600), [node("a")], FAST)
    assert (placed.prefix_source, placed.prefix_tokens) == ("pool", 1600)
    assert placed.estimates["transfer_s"] == pytest.approx(0.0016)
    assert placed.estimates["prefill_s"] == pytest.approx(0.001)


def test_the_prefix_is_computed_when_the_transfer_would_be_slower():
    placed = place(demand(pool_tokens=1600), [node("a")], SLOW)
    assert (placed.prefix_source, placed.prefix_tokens, placed.estimates["transfer_s"]) == ("none", 0, 0.0)


def test_what_lies_on_ssd_has_to_be_read_first():
    quick, slow = (replace(demand(pool_tokens=1600), ssd_s=seconds, ssd_tokens=800) for seconds in (0.5, 1.7))
    placed = place(quick, [node("a")], FAST)
    assert placed.prefix_source == "pool" and placed.estimates["transfer_s"] == pytest.approx(0.5016)
    assert placed.considered[0]["ssd_tokens"] == 800
    assert place(slow, [node("a")], FAST).prefix_source == "none", "computing takes 1.6 s"
    near = [node("a", wait_s=0.1, local_tokens=1600), node("b")]
    assert place(demand(pool_tokens=1600), near).prefill == "b"
    assert place(quick, near).prefill == "a", "who has it waits for no disk"


def test_the_arena_of_another_node_is_a_source():
    wanted = replace(demand(pool_tokens=1600), fetch_from="arena")
    placed = place(wanted, [node("a", wait_s=5.0, local_tokens=1600), node("b")])
    assert (placed.prefill, placed.prefix_source, placed.prefix_tokens) == ("b", "arena", 1600)


def test_the_threshold_keeps_a_node_with_nearly_the_same_prefix_from_fetching():
    nodes = [node("a", local_tokens=1200)]
    assert place(demand(pool_tokens=1600), nodes).prefix_source == "local"  # 1.33 times as long
    assert place(demand(pool_tokens=1600), nodes, threshold=1.3).prefix_source == "pool"


def test_an_infinite_threshold_fetches_only_for_nodes_without_any_prefix():
    never = float("inf")
    assert place(demand(pool_tokens=1600), [node("a", local_tokens=16)], threshold=never).prefix_source == "local"
    assert place(demand(pool_tokens=1600), [node("a")], threshold=never).prefix_source == "pool"
    with pytest.raises(ValueError, match="at least 1"):
        place(demand(), [node("a")], threshold=0.5)


def test_a_hot_prefix_is_copied_to_an_idle_node():
    """The replication mechanism: the holder is busy, the idle node fetches instead of computing."""
    placed = place(demand(pool_tokens=1600), [node("holder", wait_s=1.0, local_tokens=1600), node("idle")])
    assert (placed.prefill, placed.prefix_source) == ("idle", "pool")


def test_one_token_is_always_left_to_compute_and_prefixes_are_whole_blocks():
    placed = place(demand(num_tokens=1600, pool_tokens=1600), [node("a", local_tokens=1600)])
    assert placed.prefix_tokens == 1584
    assert place(demand(num_tokens=10), [node("a", local_tokens=10)]).prefix_tokens == 0


def test_attention_over_the_context_counts():
    quadratic = (0.0, 0.0, 1e-6)
    placed = place(demand(), [node("a", prefill=quadratic, local_tokens=800)])
    assert placed.estimates["prefill_s"] == pytest.approx(1e-6 * 801 * (801 + 2 * 800))


def test_decode_goes_where_there_is_room_before_where_there_is_least_load():
    nodes = [
        node("p", ("prefill",)),
        node("small", ("decode",), free_blocks=50, step_s=0.001),
        node("busy", ("decode",), free_blocks=500, step_s=0.05),
        node("idle", ("decode",), free_blocks=200, step_s=0.01),
    ]
    assert place(demand(), nodes).decode == "idle"  # 1701 tokens need 107 blocks
    assert place(demand(num_tokens=4000), nodes).decode == "busy"
    crowded = [changed(c, free_blocks=c[0].free_blocks // 10) for c in nodes]
    assert place(demand(num_tokens=4000), crowded).decode == "busy", "it will wait where most is free"


def test_decode_counts_what_is_promised_to_a_node():
    """The emptiest node of now is not the one that will be emptiest when the prompt comes."""
    nodes = [
        node("p", ("prefill",)),
        node("promised", ("decode",), step_s=0.02, step_soon_s=0.09),
        node("full", ("decode",), step_s=0.05, step_soon_s=0.03),
    ]
    placed = place(demand(), nodes)
    assert placed.decode == "full", "what runs now counts in full, however soon it may end"
    row = next(row for row in placed.considered if row["node"] == "promised")
    assert (row["step_s"], row["token_s"]) == (0.02, 0.09)
    assert row["decode_s"] == pytest.approx(row["handover_s"] + 100 * 0.09)


def test_a_prompt_goes_where_nobody_decodes_unless_it_would_wait_there():
    """Ten decodes are a toll of 1.25 times the prompt's own 1.6 s."""
    decoding = changed(node("n0"), running=10, step_s=0.02)
    assert place(demand(), [decoding, changed(node("n1"), wait_s=1.9)]).prefill == "n1"
    assert place(demand(), [decoding, changed(node("n1"), wait_s=2.1)]).prefill == "n0"
    alone = [changed(node("n0", ("prefill",)), running=10), changed(node("n1", ("prefill",)), wait_s=0.1)]
    assert place(demand(), [*alone, node("n2", ("decode",))]).prefill == "n0", "no toll on nodes of one role"


def test_decodes_avoid_queued_prompts_and_stay_together_until_a_step_has_doubled():
    source = changed(node("n0", ("prefill",)))
    calm, busy = changed(node("n1"), running=4, step_s=0.03), changed(node("n2"), running=4, step_s=0.02)
    assert place(demand(), [source, calm, busy]).decode == "n2"
    assert place(demand(), [source, calm, changed(busy, queued_tokens=100)]).decode == "n1"
    empty = changed(node("n3"), step_s=0.02)
    assert place(demand(), [source, calm, empty]).decode == "n1"
    assert place(demand(), [source, changed(calm, step_s=0.041), empty]).decode == "n3"
    only = [changed(node("n1", ("decode",)), running=4, step_s=0.03), changed(node("n3", ("decode",)), step_s=0.02)]
    assert place(demand(), [source, *only]).decode == "n3", "no toll on nodes of one role"


def test_a_mixed_node_may_do_both_without_a_transfer():
    placed = place(demand(), [node("a"), node("b", wait_s=1.0)])
    assert (placed.prefill, placed.decode, placed.estimates["handover_s"]) == ("a", "a", 0.0)
    placed = place(demand(), [node("a", step_s=0.5), node("b", wait_s=1.0)])
    assert (placed.prefill, placed.decode) == ("a", "b")
    assert placed.estimates["handover_s"] == pytest.approx(1601e3 / 1e9)


@pytest.mark.parametrize("present, missing", [("decode", "prefill"), ("prefill", "decode")])
def test_a_missing_role_is_named(present, missing):
    refused = refuse(demand(), [node("a", (present, "store")), node("s", ("store",))])
    assert missing in refused.reason and refused.retry_after_s is None
    assert "prefill" in refuse(demand(), []).reason


def test_full_queues_are_refused_with_the_time_until_the_first_has_room():
    nodes = [node("a", waiting=4, wait_s=40.0), node("b", waiting=4, wait_s=12.0)]
    refused = refuse(demand(), nodes, Limits(max_waiting=4))
    assert "full" in refused.reason and refused.retry_after_s == 3.0
    assert {row["skipped"] for row in refused.considered} == {"queue full"}
    nodes[0] = changed(nodes[0], waiting=3)
    assert place(demand(), nodes, limits=Limits(max_waiting=4)).prefill == "a"


def test_a_full_decode_stage_is_refused_before_the_prefill_is_wasted():
    refused = refuse(demand(), [node("p", ("prefill",)), node("d", ("decode",), waiting=9)], Limits(max_waiting=9))
    assert "decode" in refused.reason and refused.retry_after_s is not None


def test_a_prompt_that_never_fits_is_refused_for_good():
    refused = refuse(demand(num_tokens=20_000), [node("a")])
    assert "KV memory" in refused.reason and refused.retry_after_s is None
    placed = place(demand(num_tokens=20_000), [node("a"), node("large", total_blocks=2000, wait_s=9.0)])
    assert placed.prefill == "large"


def test_objectives_reject_early():
    assert "first token" in refuse(demand(), [node("a")], Limits(ttft_slo_s=1.0)).reason
    refused = refuse(demand(), [node("a", step_s=0.2, wait_s=6.0, waiting=2)], Limits(tpot_slo_s=0.1))
    assert "per token" in refused.reason and refused.retry_after_s == 3.0


def test_every_decision_lists_all_candidates_with_their_estimates():
    nodes = [node("p", ("prefill",)), node("q", ("prefill",)), node("d", ("decode",)), node("s", ("store",))]
    placed = place(demand(), nodes)
    assert [(row["stage"], row["node"]) for row in placed.considered] == [
        ("prefill", "p"),
        ("prefill", "q"),
        ("decode", "d"),
    ]
    assert all({"wait_s", "transfer_s", "prefill_s", "ttft_s"} <= row.keys() for row in placed.considered[:2])
    assert {"handover_s", "step_s", "headroom_blocks"} <= placed.considered[2].keys()
    json.dumps(placed.considered)


def test_equal_nodes_are_drawn_not_taken_in_order():
    policy = MooncakePlacement(Limits(), random.Random(1))
    nodes = [node("a"), node("b"), node("c")]
    assert {decide(policy, demand(), nodes).prefill for _ in range(50)} == {"a", "b", "c"}


def test_random_placement_uses_all_nodes_that_can():
    policy = placements["random"](Limits(max_waiting=4), random.Random(1))
    assert isinstance(policy, RandomPlacement)
    nodes = [node("a"), node("b", wait_s=100.0), node("c", waiting=4), node("d", ("decode",))]
    placed = [decide(policy, demand(), nodes) for _ in range(100)]
    assert {p.prefill for p in placed} == {"a", "b"} and {p.decode for p in placed} == {"a", "b", "d"}


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 3000), st.floats(1e-5, 1e-2), st.integers(1, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.floats(1e4, 1e10),
)
def test_nobody_would_have_been_faster(nodes, num_tokens, pool_tokens, bandwidth):
    roles = {1: ("prefill",), 2: ("decode",), 3: MIXED}
    candidates = [
        node(f"n{i}", roles[role], wait_s=wait, local_tokens=local, prefill=(1e-3, slope, 1e-9))
        for i, (wait, local, slope, role) in enumerate(nodes)
    ]
    policy = MooncakePlacement(Limits(), random.Random(0))
    placed = decide(policy, demand(num_tokens, pool_tokens), candidates, FlatLinks(bandwidth))
    if isinstance(placed, Rejected):
        assert "role" in placed.reason
        return
    rows = [row for row in placed.considered if row["stage"] == "prefill"]
    assert placed.estimates["ttft_s"] == pytest.approx(min(row["ttft_s"] for row in rows))
    assert 0 <= placed.prefix_tokens < num_tokens and placed.prefix_tokens % 16 == 0

"""Demands: where the prefix can be fetched, and estimates of transfers by the bytes that really move."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.layer_groups import layer_groups
from cache.results import LeadingRun
from engine.front.demands import Demands
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from sched.admission import Limits
from sched.cost import TransferModel
from sched.placement import central
from sched.placement.choice import Placement
from sched.placement.links import Links, UniformLinks
from sched.placement.measured_links import MeasuredLinks
from sched.placement.table import placements
from sched.placement.view import Candidate, View

LAYERS, HEADS, SIZE, BLOCK = 2, 3, 64, 16
PLAIN = 2 * LAYERS * HEADS * SIZE * 4  # bytes of a token in float32
ENCODED = 2 * LAYERS * HEADS * (SIZE + 4 / BLOCK)  # one byte per element, one float32 scale per head of a block
TOKENS, POOLED = 1000, 320
NONE = LeadingRun(0)


def geometry(**encodings: str) -> BlockGeometry:
    return BlockGeometry(LAYERS, HEADS, SIZE, BLOCK, "float32", **encodings)


def request_for(shape: BlockGeometry) -> Request:
    return Request("r", [1] * TOKENS, TOKENS, SamplingParams(max_tokens=4), 0.0, root_key("toy", shape))


def view_of(links: Links | None = None, nodes: int = 2) -> View:
    """p prefills, a token in 1 ms; the others decode."""

    def node(name: str, role: str) -> Candidate:
        return Candidate(
            node_id=name, roles=(role,), prefill=(0.0, 1e-3, 0.0), free_blocks=999, total_blocks=999, step_s=0.01
        )

    known = [node("p", "prefill"), *(node(f"d{i}", "decode") for i in range(nodes - 1))]
    return View(5.0, known, links or MeasuredLinks(), 256)


def placed(shape: BlockGeometry, view: View, policy: str, pooled: LeadingRun = NONE, held: int = 0) -> Placement:
    demand = Demands(shape).of(request_for(shape), pooled, held, view)
    decision = placements[policy](Limits(), random.Random(0)).place(5.0, demand, view, view.none)
    assert isinstance(decision, Placement)
    return decision


def estimate(decision: Placement, name: str) -> float:
    """As it was decided on, and as `explain` shows it."""
    stage = "decode" if name == "handover_s" else "prefill"
    (row,) = {row[name] for row in decision.considered if row["stage"] == stage}
    assert row == pytest.approx(decision.estimates[name])
    return decision.estimates[name]


def test_the_longer_of_pool_and_arenas_is_what_can_be_fetched():
    demands, request, view = Demands(geometry()), request_for(geometry()), view_of()

    def wanted(pooled: LeadingRun, held_tokens: int) -> tuple[Any, ...]:
        demand = demands.of(request, pooled, held_tokens, view)
        return demand.pool_tokens, demand.fetch_from, demand.ssd_s, demand.ssd_tokens

    pooled = LeadingRun(20, 10, 10, 0.1)
    assert wanted(pooled, 320) == (320, "pool", 0.1, 160)
    assert wanted(pooled, 336) == (336, "arena", 0.0, 0)
    slow = LeadingRun(20, 10, 10, 0.25)
    assert wanted(slow, 0) == (160, "pool", 0.0, 0)
    assert wanted(slow, 160) == (160, "pool", 0.0, 0) and wanted(slow, 176) == (176, "arena", 0.0, 0)


LINKS = UniformLinks(TransferModel(1e-3, 1e7), TransferModel(2e-3, 1e7))
"""A hand-over has a latency of 2 ms, a fetch of 1 ms; 100 ns per byte."""


@pytest.mark.parametrize("nodes", [2, central.MAX_FEW_NODES + 1])
@pytest.mark.parametrize("policy", ["mooncake", "mooncake-central-greedy", "round-robin", "least-load"])
@pytest.mark.parametrize("wire_dtype", ["", "int8", "fp8"])
def test_a_hand_over_is_as_long_as_its_encoded_bytes(wire_dtype, policy, nodes):
    """In floats, in columns, and by rivals."""
    token = ENCODED if wire_dtype else PLAIN
    decision = placed(geometry(wire_dtype=wire_dtype), view_of(LINKS, nodes), policy)
    assert estimate(decision, "handover_s") == pytest.approx(2e-3 + TOKENS * token * 1e-7)


@pytest.mark.parametrize("nodes", [2, central.MAX_FEW_NODES + 1])
@pytest.mark.parametrize(
    ("encodings", "source", "token"),
    [
        ({}, "pool", PLAIN),
        ({"pool_dtype": "int8"}, "pool", ENCODED),
        ({"wire_dtype": "int8"}, "pool", PLAIN),
        ({"pool_dtype": "fp8", "wire_dtype": "fp8"}, "arena", PLAIN),
    ],
)
def test_a_fetch_is_as_long_as_the_bytes_of_its_source(encodings, source, token, nodes):
    pooled, held = (LeadingRun(POOLED // BLOCK, POOLED // BLOCK), 0) if source == "pool" else (NONE, POOLED)
    decision = placed(geometry(**encodings), view_of(LINKS, nodes), "mooncake", pooled, held)
    assert decision.prefix_source == source
    assert estimate(decision, "transfer_s") == pytest.approx(1e-3 + POOLED * token * 1e-7)


def test_a_state_is_part_of_a_hand_over_and_of_a_fetch():
    """As three blocks of the KV of tokens, from the pool as from another arena."""
    plain = geometry()
    groups = layer_groups((), [True, False, False], 3 * plain.block_bytes, plain.layer_bytes)
    shape = replace(plain, groups=groups)
    pooled = LeadingRun(POOLED // BLOCK, POOLED // BLOCK)
    for held, source in ((POOLED, "pool"), (POOLED + BLOCK, "arena")):
        decision = placed(shape, view_of(LINKS), "mooncake", pooled, held)
        assert decision.prefix_source == source
        assert estimate(decision, "transfer_s") == pytest.approx(1e-3 + (held + 3 * BLOCK) * PLAIN * 1e-7)
    blocks = TOKENS / BLOCK * (63 + 3) / 63  # 62.5 blocks, priced as whole ones
    assert estimate(decision, "handover_s") == pytest.approx(2e-3 + blocks * BLOCK * PLAIN * 1e-7)


@pytest.mark.parametrize("nodes", [2, central.MAX_FEW_NODES + 1])
def test_windows_are_part_of_a_hand_over_of_a_fetch_and_of_the_room_that_is_needed(nodes):
    """Two groups see 100 tokens, so 7 blocks of each come along, whatever the length of the prompt."""
    groups = layer_groups([0, 100, 100])
    shape = replace(geometry(), groups=groups)
    pooled = LeadingRun(POOLED // BLOCK, POOLED // BLOCK)
    for run, held in ((pooled, 0), (NONE, POOLED)):
        decision = placed(shape, view_of(LINKS, nodes), "mooncake", run, held)
        assert decision.prefix_source == ("pool" if run is pooled else "arena")
        assert estimate(decision, "transfer_s") == pytest.approx(1e-3 + (POOLED + 14 * BLOCK) * PLAIN * 1e-7)
    of_windows = 2 * len(range((TOKENS - 99) // BLOCK, 63))
    blocks = TOKENS / BLOCK * (63 + of_windows) / 63
    assert estimate(decision, "handover_s") == pytest.approx(2e-3 + blocks * BLOCK * PLAIN * 1e-7)
    demand = Demands(shape).of(request_for(shape), pooled, 0, view_of())
    assert demand.num_blocks == 63 + of_windows == shape.handover_blocks(TOKENS + 4)


def test_a_node_without_room_for_the_windows_is_not_chosen():
    """Free blocks are those of all groups: 70 are enough for the tokens of the prompt, and not for its windows."""
    shape = replace(geometry(), groups=layer_groups([0, 100, 100]))
    costs, total = (0.0, 1e-3, 0.0), 999
    full = Candidate(node_id="full", roles=("decode",), prefill=costs, free_blocks=70, total_blocks=total, step_s=0.01)
    free = replace(full, node_id="free", free_blocks=100, step_s=0.02)
    prefill = replace(full, node_id="p", roles=("prefill",))
    for policy in ("mooncake", "mooncake-central-greedy"):
        for kind, wanted in ((shape, "free"), (geometry(), "full")):
            view = View(5.0, [prefill, full, free], LINKS, 256)
            assert placed(kind, view, policy).decode == wanted


def test_what_was_measured_of_encoded_transfers_is_what_the_next_is_expected_to_take():
    """kv_moved and prefix_fetched tell encoded bytes, as the estimates do."""
    shape, links = geometry(wire_dtype="int8", pool_dtype="int8"), MeasuredLinks()
    moved = {"event": "kv_moved", "node": "p", "detail": {"bytes": TOKENS * ENCODED, "seconds": 0.5}}
    detail = {"bytes": POOLED * ENCODED, "seconds": 0.125, "tiers": {"dram": 20}}
    links.learn([moved, {"event": "prefix_fetched", "node": "p", "detail": detail}] * 3, "d0")
    pooled = LeadingRun(POOLED // BLOCK, POOLED // BLOCK)
    decision = placed(shape, view_of(links), "mooncake", pooled)
    assert estimate(decision, "handover_s") == pytest.approx(0.5, rel=0.01)
    assert estimate(decision, "transfer_s") == pytest.approx(0.125, rel=0.01)

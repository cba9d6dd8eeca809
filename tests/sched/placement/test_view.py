"""Views: columns made of records, and estimates over them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.admission import Limits
from sched.cost import TransferModel
from sched.gossip.load_word import CLOSED, ROLE_BITS, STAGES, lack_bits, lack_of
from sched.gossip.record import RECORD, NodeRecord
from sched.membership.member import Member
from sched.placement.choice import Placement
from sched.placement.costs import prefill_costs
from sched.placement.links import UniformLinks
from sched.placement.mooncake import MooncakePlacement, ranking
from sched.placement.view import Candidate, View
from tests.sched.placement.test_placement import FAST, MIXED, NOW, FlatLinks, demand, node


def seen(*records: NodeRecord, **changes: Any) -> View:
    """The view of nodes n0, n1, ... that do everything and told these records."""
    members = [Member(f"n{i}", ("h", 1), roles=MIXED) for i in range(len(records))]
    rows = np.frombuffer(b"".join(replace(record, **changes).pack() for record in records), RECORD)
    return View.of_records(NOW, members, rows, FAST, 256)


def test_a_view_of_records_has_their_numbers():
    record = NodeRecord(
        blocks_total=100, blocks_used=30, waiting=3, waiting_batch=1, running=3, work_s=1.5, queued_tokens=70,
        prefill_a0=0.25, prefill_a1=2.0**-10, prefill_a2=2.0**-30, decode_step_s=0.5, age_s=0.125,
    )  # fmt: skip
    view = seen(record, replace(record, running=0, blocks_used=200))
    same = View(
        NOW,
        [
            Candidate(
                node_id=f"n{i}", roles=MIXED, wait_s=1.5, waiting=3, running=running, queued_tokens=70,
                prefill=(0.25, 2.0**-10, 2.0**-30), free_blocks=free, total_blocks=100, step_s=0.5, step_soon_s=0.5,
                step_alone_s=alone, age_s=0.125,
            )
            for i, (running, free, alone) in enumerate([(3, 70, 0.0), (0, 0, 0.5)])
        ],
        FAST,
        256,
    )  # fmt: skip
    assert np.array_equal(view.table, same.table) and view.ids == same.ids
    assert view.prefills.all() and view.decodes.all()


def test_uniform_links_are_alike():
    links = UniformLinks(TransferModel(1e-3, 1e6), TransferModel(1e-3, 1e9))
    (latency, _), (per_byte, _) = links.fetch(["a", "b"])
    assert (latency, per_byte) == (pytest.approx(1e-3), pytest.approx(1e-6))
    (latency, _), (per_byte, _) = links.handover("a", ["a", "b"])
    assert latency + 1_000_000 * per_byte == pytest.approx(0.002)


def test_a_node_that_became_slow_is_slow_in_everything():
    record = NodeRecord(blocks_total=1000, work_s=1.5, prefill_a1=2.0**-10, decode_step_s=0.25)
    view = seen(replace(record, residual=2.0), replace(record, residual=1.2))
    assert (view.work_until - NOW).tolist() == [3.0, 1.5]
    assert view.a1.tolist() == [2.0**-9, 2.0**-10] and view.step_s.tolist() == [0.5, 0.25]
    policy = MooncakePlacement(Limits(), random.Random(0))
    placed = policy.place(NOW, demand(), view, view.none)
    assert isinstance(placed, Placement) and (placed.prefill, placed.decode) == ("n1", "n1")


def test_a_node_with_masked_ranks_is_slower_by_their_share_and_one_without_experts_comes_last():
    record = NodeRecord(blocks_total=1000, work_s=1.5, prefill_a1=2.0**-10, decode_step_s=0.25)
    does = sum(ROLE_BITS.values())
    flags = [does | lack_bits(0.5), does | lack_bits(1.0), does]
    view = seen(*(replace(record, flags=one) for one in flags))
    assert (view.work_until - NOW).tolist() == [3.0, 24.0, 1.5]
    assert view.a1.tolist() == [2.0**-9, 2.0**-6, 2.0**-10] and view.step_s.tolist() == [0.5, 4.0, 0.25]
    policy = MooncakePlacement(Limits(), random.Random(0))
    for nodes, best in ((3, "n2"), (2, "n0")):
        view = seen(*(replace(record, flags=one) for one in flags[:nodes]))
        placed = policy.place(NOW, demand(), view, view.none)
        assert isinstance(placed, Placement) and (placed.prefill, placed.decode) == (best, best)
    alone = seen(replace(record, flags=flags[1]))
    placed = policy.place(NOW, demand(), alone, alone.none)
    assert isinstance(placed, Placement) and placed.prefill == "n0"


def test_a_share_of_masked_ranks_is_rounded_up_and_leaves_the_other_flags():
    assert [lack_of(lack_bits(share)) for share in (0, 1 / 64, 0.25, 0.5, 63 / 64, 1)] == [
        0, 1 / 16, 0.25, 0.5, 15 / 16, 15 / 16,
    ]  # fmt: skip
    assert not lack_bits(1.0) & (CLOSED | STAGES | sum(ROLE_BITS.values()))


def test_a_node_that_gave_up_a_role_is_no_candidate_for_it():
    view = seen(NodeRecord(blocks_total=100, flags=ROLE_BITS["prefill"] | ROLE_BITS["store"]), NodeRecord())
    assert view.prefills.tolist() == [True, True] and view.decodes.tolist() == [False, True]


def test_a_node_says_whether_it_can_be_a_stage():
    able = NodeRecord(blocks_total=100, flags=ROLE_BITS["prefill"] | STAGES)
    view = seen(able, replace(able, flags=ROLE_BITS["prefill"]), NodeRecord())
    assert view.stages.tolist() == [True, False, True], "a node without a record yet may be able"
    assert view.only([1, 0]).stages.tolist() == [False, True]
    assert view.only([1]).joined_with(view.only([0])).stages.tolist() == [False, True]
    later = seen(able, able, able)
    later.keep([0], view, [1])
    assert later.stages.tolist() == [False, True, True]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.floats(0, 1e-2), st.floats(0, 1e-6), st.integers(0, 4000), st.sampled_from("pdm")
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.sampled_from([1.0, 1.5, 4.0, np.inf]),
    st.floats(1e4, 1e9),
    st.floats(-5, 50),
    st.sampled_from([0.0, 0.01, 5.0]),
)
def test_ranking_is_the_time_to_first_token_in_half_the_work(
    nodes, num_tokens, pool_tokens, threshold, bytes_s, later, ssd_s
):
    roles = {"p": ("prefill",), "d": ("decode",), "m": MIXED}
    known = [
        node(f"n{i}", roles[role], wait_s=wait, prefill=(1e-3, slope, bend), total_blocks=150)
        for i, (wait, slope, bend, _, role) in enumerate(nodes)
    ]
    wanted = replace(demand(num_tokens, pool_tokens), ssd_s=ssd_s)
    view = View(NOW, [candidate for candidate, _ in known], FlatLinks(bytes_s), 256)
    matched = np.array([float(min(local // 16 * 16, wanted.usable_tokens)) for *_, local, _ in nodes])
    for held in (matched, view.none):
        found = ranking(NOW + later, wanted, view, held, threshold)
        exact = prefill_costs(NOW + later, wanted, view, held, threshold).ttft_s + NOW + later
        assert found == pytest.approx(exact, rel=1e-9)

"""Which running request moves where: pairs, hysteresis, the cheapest request, and no move that turns a gap around."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sched.migration import (
    LEAST_LEFT,
    SPARE_BLOCKS,
    Balancer,
    DecodeNode,
    Movable,
    in_need,
    to_balance,
    to_leave,
)


def node(name: str, used: int, requests: int = 0, total: int = 100, seats: int = 20) -> DecodeNode:
    return DecodeNode(name, used, total, requests, seats)


def test_the_most_loaded_node_gives_to_the_least_loaded_one():
    nodes = [node("a", 90), node("b", 70), node("c", 30), node("d", 10)]
    partners = {one.node_id: Balancer(one.node_id).partner(nodes) for one in nodes}
    assert {name: found and found.node_id for name, found in partners.items()} == {
        "a": "d",
        "b": "c",
        "c": None,
        "d": None,
    }


def test_a_pair_goes_on_below_the_gap_at_which_it_began():
    balancer = Balancer("a")
    assert balancer.partner([node("a", 35), node("b", 20)]) is None
    assert balancer.partner([node("a", 55), node("b", 20)]) is not None
    assert balancer.partner([node("a", 35), node("b", 20)]) is not None
    assert balancer.partner([node("a", 25), node("b", 20)]) is None
    assert balancer.partner([node("a", 35), node("b", 20)]) is None


def test_seats_count_too():
    assert Balancer("a").partner([node("a", 10, requests=18), node("b", 10, requests=2)]) is not None


def test_the_request_with_the_most_tokens_left_per_block_moves():
    me, partner = node("a", 80, 10), node("b", 20, 2)
    requests = [Movable("long", 20, 400), Movable("short", 4, 300), Movable("over", 1, LEAST_LEFT - 1)]
    assert to_balance(requests, me, partner) == requests[1]
    assert to_balance([Movable("huge", 50, 900)], me, partner) is None, "it would turn the gap around"


@given(
    requests=st.lists(st.builds(Movable, st.uuids().map(str), st.integers(1, 60), st.integers(0, 500)), max_size=8),
    mine=st.tuples(st.integers(0, 100), st.integers(0, 20)),
    other=st.tuples(st.integers(0, 100), st.integers(0, 20)),
)
def test_a_move_never_makes_the_partner_the_more_loaded_one(requests, mine, other):
    me, partner = node("a", *mine), node("b", *other)
    chosen = to_balance(requests, me, partner)
    if chosen is not None:
        after = node("b", other[0] + chosen.blocks, other[1] + 1)
        left = node("a", max(0, mine[0] - chosen.blocks), max(0, mine[1] - 1))
        assert after.load <= me.load and after.blocks_used <= after.blocks_total - SPARE_BLOCKS
        assert me.load - partner.load > 0 and left.load <= me.load


def test_need_is_when_not_every_request_can_get_one_more_block():
    requests = [Movable("a", 8, 100), Movable("b", 4, 100)]
    nodes = [node("c", 90), node("d", 50), node("e", 10, requests=20)]
    assert in_need(requests, 2, nodes) is None
    assert in_need(requests, 1, nodes) == (requests[1], nodes[1])
    assert in_need(requests[:1], 0, nodes) is None, "one request makes progress alone"
    assert in_need(requests, 0, [node("c", 95)]) is None


def test_a_node_that_leaves_moves_everything_that_fits():
    requests = [Movable("short", 2, 1), Movable("long", 60, 500)]
    nodes = [node("a", 30), node("b", 60)]
    assert to_leave(requests, nodes) == (requests[1], nodes[0])
    assert to_leave(requests, [nodes[1]]) == (requests[0], nodes[1])
    assert to_leave(requests, []) is None

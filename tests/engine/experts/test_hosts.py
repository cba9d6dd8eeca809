"""Copies of an expert on different hosts: what a swap keeps, and when no swap is left."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.placing.balance import Balance
from engine.experts.placing.eplb import apart, rebalanced
from engine.experts.placing.hosts import Hosts, confined, spread
from engine.experts.placing.placement import Placement, imbalance
from engine.experts.remote_ranks import host_of


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[str | None]]:
    """(experts of each rank, loads, hosts)."""
    ranks = draw(st.integers(2, 6))
    loads = draw(st.lists(st.floats(0, 1e4), min_size=2, max_size=14))
    experts = len(loads)
    room = [n for n in range(experts, ranks * experts + 1) if n % ranks == 0]
    copies = draw(st.sampled_from(room))
    hosts = draw(st.lists(st.sampled_from([None, "b", "c"]), min_size=ranks, max_size=ranks))
    return apart(rebalanced(loads, copies, 1, 1, ranks), loads), loads, hosts


def swaps(placed: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """All placements with one copy of an expert swapped for one of another, and no rank with an expert twice."""
    found = []
    for a, b in combinations(range(len(placed)), 2):
        for one in set(placed[a]) - set(placed[b]):
            for other in set(placed[b]) - set(placed[a]):
                after = [list(experts) for experts in placed]
                after[a][after[a].index(one)], after[b][after[b].index(other)] = other, one
                found.append(after)
    return found


@given(layers())
def test_every_rank_keeps_its_room_and_no_other_swap_would_free_an_expert(layer):
    placed, loads, hosts = layer
    before = [list(experts) for experts in placed]
    found = spread(placed, loads, hosts)
    assert placed == before
    assert [len(experts) for experts in found] == [len(experts) for experts in placed]
    assert all(len(set(experts)) == len(experts) for experts in found)
    assert Counter(e for experts in found for e in experts) == Counter(e for experts in placed for e in experts)
    left = confined(found, hosts)
    assert left <= confined(placed, hosts)
    assert all(not confined(after, hosts) < left for after in swaps(found))


@given(layers())
def test_confined_are_those_whose_copies_one_host_takes_with_it(layer):
    placed, _, hosts = layer
    lost: set[int] = set()
    for host in {*hosts} - {None}:
        kept = {e for rank, experts in enumerate(placed) if hosts[rank] != host for e in experts}
        lost |= {e for experts in placed for e in experts} - kept
    copies = Counter(e for experts in placed for e in experts)
    assert confined(placed, hosts) == {e for e in lost if copies[e] > 1}


def test_ranks_of_one_host_each_keep_what_eplb_gives_them():
    placed = [[0, 1], [2, 0], [1, 2]]
    assert spread(placed, [1.0, 1.0, 1.0], ["a", "b", "c"]) == placed
    assert spread(placed, [1.0, 1.0, 1.0], [None] * 3) == placed


@pytest.mark.parametrize(("source", "host"), [("127.0.0.1", None), ("127.0.0.2", "127.0.0.2")])
def test_a_rank_of_the_same_address_is_on_the_same_host(source, host):
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname(), source_address=(source, 0)):
        sock, _ = server.accept()
        with sock:
            assert host_of(sock) == host


def moved(hosts: Hosts, layer: Sequence[Sequence[int]], loads: Sequence[int]) -> Placement | None:
    """What Balance does at its first look."""
    balance = Balance(1, 1, lambda: hosts)
    placement = Placement(len(loads), (tuple(tuple(slots) for slots in layer),))
    found = balance.next(torch.tensor([loads]), placement)
    return None if found is None else found[1]


def test_experts_move_to_other_hosts_although_no_rank_gets_less_to_do():
    layer, loads = [[0, 1], [0, 1], [2, 3], [2, 3]], [100, 100, 100, 100]
    hosts = [None, None, "b", "b"]
    assert moved([None, None, "b", "c"], layer, loads) is None
    after = moved(hosts, layer, loads)
    assert after is not None and not confined(after.layers[0], hosts)
    assert imbalance(after.layers[0], loads) == 1
    assert moved(hosts, after.layers[0], loads) is None


@given(layers(), st.randoms(use_true_random=False))
def test_no_rank_gets_less_to_do_at_the_price_of_an_expert_that_one_host_has(layer, rng):
    """Loads have changed since the experts got their places."""
    placed, before, hosts = layer
    loads = [1000 * rng.randrange(1, 20) ** 2 for _ in before]
    placed = spread(placed, before, hosts)
    after = moved(hosts, placed, loads)
    if after is not None:
        slots = after.layers[0]
        fewer = len(confined(placed, hosts)) - len(confined(slots, hosts))
        assert fewer > 0 or (fewer == 0 and imbalance(slots, loads) < imbalance(placed, loads))

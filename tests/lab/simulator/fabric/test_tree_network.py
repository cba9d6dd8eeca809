"""The fat tree: paths and capacities, fair shares of its links, and the order of flows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.node.resource_use import REFRESH_S
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.fabric.tree import HOST_BYTES_S, FatTree, path
from lab.simulator.fabric.tree_network import LOOK_S, TreeFlow, TreeNetwork, fill
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import FETCH, HANDOVER, PUBLISH
from sched.placement.links import distance
from tests.lab.simulator.test_cluster import check, rows

TREE = FatTree.parse("2x2x2:2:4")
NAMES = [[f"prefill-{i}" for i in range(8)], [f"decode-{i}" for i in range(8)]]
PLACES = TREE.places(NAMES)


def network(ordered: bool = False, tree: FatTree = TREE) -> tuple[Loop, TreeNetwork]:
    loop = Loop()
    return loop, TreeNetwork(loop, 100.0, 0.0, tree, tree.places(NAMES), ordered)


def test_roles_are_spread_evenly_and_each_level_is_full():
    assert PLACES["prefill-0"] == PLACES["decode-0"] == ("pod0", "rack0", "host0")
    assert PLACES["decode-7"] == ("pod1", "rack3", "host7")
    for level, each in ((0, 8), (1, 4), (2, 2)):
        parts = [place[level] for place in PLACES.values()]
        assert {parts.count(part) for part in parts} == {each}


def test_a_path_has_the_links_up_to_the_common_switch():
    far = path("prefill-0", "decode-7", PLACES)
    assert [way for _, way in far] == ["up", "up", "up", "down", "down", "down"]
    assert [name for name, _ in far] == ["node prefill-0", "rack0", "pod0", "pod1", "rack3", "node decode-7"]
    assert [len(path("prefill-0", node, PLACES)) for node in ("decode-0", "decode-1", "decode-2", "decode-4")] == [
        1, 2, 4, 6,
    ]  # fmt: skip
    assert [distance(PLACES["prefill-0"], PLACES[f"decode-{i}"]) for i in (0, 1, 2, 4)] == [0, 1, 2, 3]


def test_links_are_as_wide_as_the_ratios_say():
    assert TREE.capacity(("rack0", "up"), 100.0) == 4 * 100 / 2
    assert TREE.capacity(("pod0", "up"), 100.0) == 2 * (4 * 100 / 2) / 4
    assert TREE.capacity(("host0", "inside"), 100.0) == HOST_BYTES_S
    for text in ("2x2", "2x2x2:0.5", "0x1x1", "axbxc", "2x2x2:1:2:3", "2x2x2:nan"):
        with pytest.raises(ValueError, match=r"NODESxHOSTSxRACKS|at least 1"):
            FatTree.parse(text)


def test_what_one_link_limits_is_left_to_the_others():
    """Two flows cross the core (100 bytes/s for both); a third one shares a NIC with one of them and takes its rest."""
    loop, net = network()
    ended = {}
    for name, source, target in (("a", 0, 7), ("b", 1, 6), ("c", 0, 1)):
        net.send(f"prefill-{source}", f"decode-{target}", 100, lambda name=name: ended.setdefault(name, loop.now))
    loop.run()
    assert ended == {"a": pytest.approx(2.0), "b": pytest.approx(2.0), "c": pytest.approx(2.0)}
    loop, net = network(tree=replace(TREE, pod_ratio=8.0))  # the core has 50: a and b get 25 each, c 75
    net.send("prefill-0", "decode-7", 100, lambda: ended.update(a=loop.now))
    net.send("prefill-1", "decode-6", 100, lambda: ended.update(b=loop.now))
    net.send("prefill-0", "decode-1", 75, lambda: ended.update(c=loop.now))
    loop.run()
    assert ended == {"a": pytest.approx(4.0), "b": pytest.approx(4.0), "c": pytest.approx(1.0)}
    assert net.bytes_moved == 275


@pytest.mark.parametrize(("ordered", "wanted"), [(False, [3.0, 3.0, 3.0]), (True, [1.0, 2.0, 3.0])])
def test_the_urgent_flow_goes_first_if_flows_are_ordered(ordered, wanted):
    loop, net = network(ordered)
    ended: dict[int, float] = {}

    def done(rank: int) -> None:
        ended[rank] = loop.now

    for rank in (PUBLISH, FETCH, HANDOVER):
        net.send("prefill-0", f"decode-{rank + 1}", 100, partial(done, rank), rank)
    loop.run()
    assert [ended[rank] for rank in (HANDOVER, FETCH, PUBLISH)] == pytest.approx(wanted)


def test_a_node_tells_how_busy_its_nic_was_since_the_last_look():
    """A mean, as nodes gossip it: the rate of a single moment is nearly always 0 or 1."""
    loop, net = network()
    seen: dict[float, dict[str, tuple[float, float]]] = {}
    for at_s in (0.0, 1.0, 1.25, 2.0, 3.0):
        loop.at(at_s, lambda at_s=at_s: seen.setdefault(at_s, net.use()))
    loop.at(0.1, net.send, "prefill-0", "decode-1", 25.0, lambda: None)  # 0.25 s
    loop.at(0.1, net.send, "prefill-2", "prefill-2", 1000.0, lambda: None)
    loop.at(0.1, net.send, "prefill-3", "decode-3", 1000.0, lambda: None)  # on one host, without a NIC
    loop.at(1.5, net.send, "prefill-0", "decode-1", 100.0, lambda: None)  # still on its way at the look at 2 s
    loop.run()
    busy = {at_s: (use["prefill-0"], use["decode-1"]) for at_s, use in seen.items()}
    assert busy[0.0] == ((0.0, 0.0), (0.0, 0.0))
    assert busy[1.0] == ((0.0, pytest.approx(0.25)), (pytest.approx(0.25), 0.0))
    assert busy[1.25] == busy[1.0], "a node looks every half second"
    assert busy[2.0] == busy[3.0] == ((0.0, pytest.approx(0.5)), (pytest.approx(0.5), 0.0))
    idle = [use[node] for use in seen.values() for node in ("prefill-2", "prefill-3", "decode-3", "decode-0")]
    assert set(idle) == {(0.0, 0.0)}
    assert LOOK_S == REFRESH_S


def test_a_nic_that_has_become_slow_is_at_most_fully_used():
    loop, net = network()
    seen: list[dict[str, tuple[float, float]]] = []
    for at_s in (0.0, 1.0):
        loop.at(at_s, lambda: seen.append(net.use()))
    net.send("prefill-0", "decode-1", 1000.0, lambda: None)
    loop.at(0.9, net.slowness.update, {"prefill-0": 10.0})
    loop.run()
    assert seen[1]["prefill-0"] == (0.0, 1.0) and seen[1]["decode-1"] == (pytest.approx(1.0), 0.0)


pairs = st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from(["prefill", "decode"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(pairs, min_size=1, max_size=30))
def test_shares_are_max_min_fair(ends):
    """No link is overfull, and every flow has a link that is full and on which no flow is faster."""
    _, net = network()
    flows = [
        TreeFlow(path(f"prefill-{a}", f"{role}-{b}", PLACES), 1.0, PUBLISH, lambda: None)
        for a, b, role in ends
        if role == "decode" or a != b
    ]
    left = {link: net._capacity(link) for flow in flows for link in flow.links}
    width = dict(left)
    fill(flows, left)
    for link, capacity in width.items():
        assert sum(flow.rate for flow in flows if link in flow.links) <= capacity * (1 + 1e-9)
    for flow in flows:
        assert any(
            left[link] <= width[link] * 1e-9
            and all(other.rate <= flow.rate * (1 + 1e-9) for other in flows if link in other.links)
            for link in flow.links
        )


@pytest.mark.parametrize("placement", ["netkv", "mooncake", "decode-in-turn", "decode-by-load"])
def test_a_cluster_on_a_tree_serves_everything(placement):
    config = SimConfig(prefill=4, decode=4, placement=placement, fat_tree="2x2x2:2:4", pool_blocks=50, nic_gbit_s=50.0)
    for flow_order in ("fair", "deadline"):
        cluster = Cluster(replace(config, flow_order=flow_order)).played(rows(40, 200.0))
        check(cluster)
        assert all(job.finished > 0 for job in cluster.jobs)


def test_netkv_goes_near_and_a_tuned_scheduler_by_load_does_not_care():
    near = {}
    for placement in ("netkv", "decode-by-load"):
        config = SimConfig(prefill=8, decode=8, placement=placement, fat_tree="2x2x2:2:4", nic_gbit_s=25.0)
        cluster = Cluster(config).played(rows(60, 1000.0))
        places = cluster.network.places
        near[placement] = sum(distance(places[job.prefill], places[job.decode]) == 0 for job in cluster.jobs)
    assert near["netkv"] > 40 > near["decode-by-load"]


def test_the_order_of_flows_needs_a_tree():
    with pytest.raises(ValueError, match="--flow-order deadline needs --fat-tree"):
        SimConfig(flow_order="deadline")
    with pytest.raises(ValueError, match="--fat-tree"):
        SimConfig(fat_tree="2x2")

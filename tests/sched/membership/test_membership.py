"""Membership under a virtual network; each test also holds every packet to the size limit (see virtual.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sched.membership.events import Join, Joined, MemberDown, MemberSuspected, Refused, Suspect, Tick
from sched.membership.member import Member, Status, presets
from sched.membership.swim import Membership
from tests.sched.virtual import ROOT, VirtualNet

LOCAL = replace(presets["local"], state_period_s=2.0)
"""Records are rare here: they are most of the work, and tests/sched/gossip/test_state.py is about them."""


def converged_net(size: int, seed: int, **network: Any) -> VirtualNet:
    net = VirtualNet(seed, LOCAL, **network)
    net.cluster(size)
    took = net.run_until(net.converged, 60.0)
    assert took is not None, {node.name: len(node.sees()) for node in net.nodes.values()}
    return net


def false_deaths(net: VirtualNet, dead: set[str] = frozenset()) -> list:
    return [(node.name, down) for node in net.nodes.values() for down in node.downs() if down[1].node_id not in dead]


@pytest.mark.parametrize("size", [3, 8, 32])
def test_nodes_that_join_through_any_node_all_see_each_other(size):
    net = VirtualNet(seed=size, preset=LOCAL)
    nodes = net.cluster(size)
    assert net.run_until(net.converged, 3.0) is not None
    net.run(5.0)
    assert net.converged() and not false_deaths(net)
    for node in nodes[1:]:
        assert [effect for _, effect in node.log if isinstance(effect, Joined)] == [Joined()]
    for node in nodes:
        assert sorted(node.ups()) == sorted(set(net.nodes) - {node.name})


@pytest.mark.parametrize("size", [3, 8, 32])
@pytest.mark.parametrize("seed", range(4))
def test_a_crash_is_known_everywhere_within_the_preset_s_bound(size, seed):
    net = converged_net(size, seed)
    net.run(net.rng.random())
    net.crash("n1")
    took = net.run_until(net.converged, 60.0)
    assert took is not None and took <= LOCAL.detection_s(size)
    assert not false_deaths(net, {"n1"})
    for node in net.nodes.values():
        if node.up:
            assert [down.node_id for _, down in node.downs()] == ["n1"]


def test_detection_on_one_host_takes_two_or_three_seconds():
    times = []
    for seed in range(12):
        net = converged_net(4, seed)
        net.run(net.rng.random())
        net.crash("n2")
        times.append(net.run_until(net.converged, 10.0))
    times.sort()
    print(times)
    assert times[len(times) // 2] < 2.5 and times[-1] < 3.5


def test_a_broken_connection_shortens_detection_to_the_suspicion_time():
    net = converged_net(8, seed=1)
    net.crash("n1")
    for node in net.nodes.values():
        if node.up:
            net.tell(node.name, Suspect("n1"))
    took = net.run_until(net.converged, 10.0)
    assert took is not None and took <= LOCAL.suspicion_s(8) + 0.1


@pytest.mark.parametrize("size", [3, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_a_node_paused_for_less_than_the_suspicion_time_is_not_declared_dead(size, seed):
    net = converged_net(size, seed)
    net.run(net.rng.random())
    net.pause("n1", 0.95 * LOCAL.suspicion_s(size))
    net.run(6.0)
    assert not false_deaths(net)
    assert net.converged()
    assert all(member.status is Status.ALIVE for node in net.nodes.values() for member in node.core.membership.alive())


def test_a_paused_node_is_suspected_and_refutes_with_a_higher_incarnation():
    net = converged_net(3, seed=3)
    net.pause("n1", 1.1)  # each other node probes it within two periods, and waits for one
    net.run(1.05)
    assert net.nodes["n0"].core.membership.get("n1").status is Status.SUSPECT
    net.run(2.0)
    assert net.nodes["n1"].core.membership.me.incarnation >= 1
    assert net.nodes["n1"].core.counters["refutations"] >= 1
    for node in net.nodes.values():
        seen = node.core.membership.get("n1")
        assert (seen.status, seen.incarnation) == (Status.ALIVE, net.nodes["n1"].core.membership.me.incarnation)


def test_a_node_paused_for_long_comes_back_and_kills_nobody():
    net = converged_net(8, seed=4)
    net.pause("n1", 10.0)
    net.run(9.0)
    assert all("n1" not in node.sees() for node in net.nodes.values() if node.name != "n1")
    assert net.run_until(net.converged, 10.0) is not None
    net.run(3.0)
    assert not net.nodes["n1"].downs(), "a node that slept must not blame the others"
    assert net.converged()


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_stood_still_hears_the_refutation_before_it_judges(seed):
    net = converged_net(4, seed)
    net.tell("n1", Suspect("n2"))
    net.pause("n1", 4.0)  # the refutation waits in its socket, the deadline passes
    net.run(8.0)
    assert not net.nodes["n1"].downs() and net.converged()
    assert net.nodes["n1"].core.counters["pauses"] == 1


@pytest.mark.parametrize("size", [3, 8, 32])
def test_twenty_percent_loss_with_duplicates_and_reordering_still_converges(size):
    net = VirtualNet(seed=20 + size, preset=LOCAL, loss=0.2, duplicate=0.1, delay_s=(0.0005, 0.05))
    net.cluster(size)
    assert net.run_until(net.converged, 30.0) is not None
    net.run(10.0)
    assert not false_deaths(net) and net.converged()
    net.crash("n1")
    assert net.run_until(net.converged, 3 * LOCAL.detection_s(size)) is not None


@pytest.mark.parametrize("size", [3, 8, 32])
def test_leaving_is_known_at_once(size):
    net = converged_net(size, seed=5)
    net.leave("n1")
    took = net.run_until(net.converged, 5.0)
    assert took is not None and took < 0.1
    assert {down.reason for node in net.nodes.values() if node.up for _, down in node.downs()} == {"left"}


def test_leaving_under_loss_is_faster_than_dying():
    net = converged_net(8, seed=6, loss=0.2)
    net.leave("n1")
    took = net.run_until(net.converged, 5.0)
    assert took is not None and took < LOCAL.suspicion_s(8)


def test_another_node_may_take_over_the_address_of_a_crashed_one():
    net = converged_net(4, seed=7)
    address = net.nodes["n1"].address
    net.crash("n1")
    net.start("fresh", address=address)
    net.join("fresh", "n2")
    assert net.run_until(net.converged, 1.0) is not None, "the joiner owns the address, nobody waits for the dead"
    net.run(5.0)
    assert net.converged() and not false_deaths(net, {"n1"})


@pytest.mark.parametrize("seed", range(3))
def test_a_node_may_rejoin_under_its_own_name_before_its_death_was_noticed(seed):
    net = converged_net(4, seed=30 + seed)
    address = net.nodes["n1"].address
    net.crash("n1")
    net.run(0.05)
    net.start("n1", address=address)
    net.join("n1", "n2")
    net.run(3.0)
    assert net.converged()
    for name in ("n0", "n2", "n3"):
        assert [down.reason for _, down in net.nodes[name].downs()] == ["restarted"]
        assert net.nodes[name].ups().count("n1") == 2


def test_a_node_may_rejoin_under_its_own_name_after_its_death():
    net = converged_net(4, seed=8)
    net.crash("n1")
    assert net.run_until(net.converged, 10.0) is not None
    net.start("n1")
    net.join("n1", "n0")
    assert net.run_until(net.converged, 2.0) is not None
    assert net.nodes["n1"].core.membership.me.incarnation > 0


def test_a_joiner_with_another_root_is_refused_with_the_reason_on_both_sides():
    net = converged_net(3, seed=9)
    stranger = net.start("stranger", root="ff" * 16, model="other-model", block_size=32)
    net.join("stranger", "n0")
    net.run(3.0)
    [refused] = [effect for _, effect in stranger.log if isinstance(effect, Refused)]
    seen = [effect for _, effect in net.nodes["n0"].log if isinstance(effect, Refused)]
    assert seen and all(effect == refused for effect in seen)
    for word in ("toy", "other-model", "block size 16", "block size 32", "--cluster-block-size"):
        assert word in refused.reason
    assert "--model and --cluster-block-size" in refused.reason and "--cluster-kv-dtype" not in refused.reason
    assert stranger.sees() == {"stranger"}
    assert all(node.sees() == {"n0", "n1", "n2"} for node in net.nodes.values() if node is not stranger)


@pytest.mark.parametrize("name", ["n0", "n1"])
def test_a_joiner_under_a_name_in_use_is_refused(name):
    """n0 is the node asked, n1 another one."""
    net = converged_net(3, seed=10)
    first, asked = net.nodes[name], net.nodes["n0"].address
    double = net.start(name)
    net.tell(name, Join(asked))
    net.run(1.0)
    [refused] = [effect for _, effect in double.log if isinstance(effect, Refused)]
    assert f"taken by the node at {first.address[0]}:{first.address[1]}, which lives" in refused.reason


@pytest.mark.parametrize("silent_s", [0.0, 0.5])
def test_a_node_started_again_elsewhere_under_its_name_waits_for_the_death_of_its_old_self(silent_s):
    """The same command again, right after a kill -9: the port is another one, and nobody knows of the death yet."""
    net = converged_net(3, seed=16)
    net.crash("n1")
    net.run(silent_s)
    again = net.start("n1")
    net.tell("n1", Join(net.nodes["n0"].address))
    assert net.run_until(lambda: again.sees() == {"n0", "n1", "n2"} and net.converged(), 4.0) is not None
    assert not any(isinstance(effect, Refused) for _, effect in again.log)
    assert net.nodes["n2"].core.membership.get("n1").address == again.address


def test_a_node_cannot_join_itself():
    net = VirtualNet(seed=11)
    net.start("n0")
    net.join("n0", "n0")
    net.run(1.0)
    assert any(isinstance(effect, Refused) and "own" in effect.reason for _, effect in net.nodes["n0"].log)


def test_a_node_that_left_is_silent():
    net = converged_net(4, seed=15)
    net.crash("n3")
    net.run(1.0)  # n1 goes while it suspects somebody
    net.leave("n1")
    core, now = net.nodes["n1"].core.membership, net.now + net.nodes["n1"].clock_offset
    assert core.handle(now + 1.0, Tick()) == [] and core.wake_at() > now + 1.0


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_partition_heals(loss):
    net = converged_net(8, seed=12, loss=loss)
    left, right = {f"n{i}" for i in range(4)}, {f"n{i}" for i in range(4, 8)}
    net.partition(left, right)
    net.run(15.0)
    for side in (left, right):
        assert all(net.nodes[name].sees() == side for name in side), "both sides go on with what they have"
    net.heal()
    assert net.run_until(net.converged, 6 * LOCAL.sync_period_s) is not None


def test_the_same_seed_gives_the_same_run():
    def trace() -> str:
        net = converged_net(8, seed=13, loss=0.1, duplicate=0.1)
        net.crash("n3")
        net.run(3.0)
        return net.trace

    assert trace() == trace()


def test_a_quiet_cluster_sends_little():
    net = converged_net(8, seed=14)
    net.run(10.0)
    before = net.bytes_sent
    net.run(10.0)
    per_node = (net.bytes_sent - before) / 10 / 8
    print(f"{per_node:.0f} bytes/s per node")
    assert per_node < 100_000


def test_a_member_too_long_for_a_packet_is_a_clear_error():
    import random

    with pytest.raises(ValueError, match="too long"):
        Membership(0.0, Member("n", ("h", 1), info={"model": "m" * 2000}), LOCAL, random.Random(0))
    with pytest.raises(ValueError, match="64 bytes"):
        Membership(0.0, Member("n" * 65, ("h", 1)), LOCAL, random.Random(0))


def test_a_suspicion_is_told_before_the_death_and_only_while_it_is_news():
    net = converged_net(4, seed=5)
    net.crash("n2")
    assert net.run_until(net.converged, 10.0) is not None
    for node in net.up():
        told = [effect for _, effect in node.log if isinstance(effect, MemberSuspected | MemberDown)]
        assert [type(effect) for effect in told] == [MemberSuspected, MemberDown]
        assert {effect.node_id for effect in told} == {"n2"}


def test_a_suspect_whose_refutation_was_lost_on_the_way_to_one_node_has_the_last_word():
    net = converged_net(6, seed=7)
    net.pause("n2", 1.0)
    suspected = [n for n in net.up() if n.name != "n2"]
    assert net.run_until(
        lambda: all(node.core.membership.get("n2").status is Status.SUSPECT for node in suspected), 5.0
    )
    deaf = net.node("n4")
    net.cut([node.name for node in net.up()], ["n4"])  # neither the refutation nor rumours of it get there
    net.run(1.1)
    assert net.node("n2").core.membership.me.incarnation >= 1
    net.heal()
    suspicion = deaf.core.membership._detector._suspicions._open["n2"]
    net.cut([node.name for node in net.up() if node.name != "n2"], ["n4"])  # nor from others afterwards
    suspicion.started_at -= 60.0
    net.run(0.2)
    assert deaf.core.membership.get("n2").status is Status.ALIVE and not deaf.downs()


def test_two_sites_that_are_cut_off_each_go_on_and_find_each_other_again():
    """Each side keeps its own members, and so the homes of its blocks; of the other site none is left."""
    net = VirtualNet(11, LOCAL)
    for name in ("e0", "e1", "w0", "w1"):
        net.add(name, root=ROOT, site={"e": "east", "w": "west"}[name[0]])
    net.acquaint()
    assert net.run_until(net.converged, 10.0) is not None

    def sites(name: str) -> dict[str, str]:
        return {one.node_id: one.site for one in net.node(name).core.membership.alive()}

    everyone = {"e0": "east", "e1": "east", "w0": "west", "w1": "west"}
    assert all(sites(name) == everyone for name in everyone)
    net.partition(["e0", "e1"], ["w0", "w1"])
    assert net.run_until(lambda: all(len(sites(name)) == 2 for name in everyone), 60.0) is not None
    for name, own in everyone.items():
        assert sites(name) == {other: site for other, site in everyone.items() if site == own}
    net.heal()
    assert net.run_until(lambda: all(sites(name) == everyone for name in everyone), 60.0) is not None


@pytest.mark.parametrize("site", [7, None, ["a"], "x" * 65])
def test_an_invalid_site_is_none(site):
    assert Member("n", ("h", 1), info={"site": site}).site == ""


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ("pod1/rack3/h9", ("pod1", "rack3", "h9")),
        ("/a//b/", ("a", "b")),
        ("", ()),
        (7, ()),
        (["a"], ()),
        ("x" * 65, ()),
    ],
)
def test_a_place_that_is_no_short_text_is_no_place(told, place):
    assert Member("n", ("h", 1), info={"place": told}).place == place

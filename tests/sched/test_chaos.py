"""Random schedules of every fault at once: whatever happened, the cluster agrees again afterwards.

CHAOS_SEEDS=1000 runs as many seeds; a failing one is in the test's name and replays exactly.
"""

from __future__ import annotations

import os

import pytest

from sched.events import MemberDown, MemberUp
from sched.virtual_cluster import GossipNode
from tests.sched.virtual import VirtualNet


@pytest.mark.parametrize("number", range(int(os.environ.get("CHAOS_SEEDS", "15"))))
def test_the_cluster_agrees_after_any_faults(number):
    net = VirtualNet(number, loss=number % 4 * 0.1, duplicate=0.05, delay_s=(0.0002, 0.02))
    net.cluster(net.rng.randrange(3, 9))
    assert net.run_until(net.converged, 60.0) is not None
    for _ in range(12):
        one_fault(net)
        net.run(net.rng.uniform(0.05, 2.0))
    net.heal()
    net.weather.loss = 0.0
    net.run(5.0)  # suspicions raised by the faults run out; pauses end
    help_the_stranded(net)
    assert net.run_until(net.converged, 60.0) is not None, {n.name: n.sees() for n in net.nodes.values() if n.up}
    net.run(2.0)
    assert net.converged()
    for node in net.nodes.values():
        check_alternation(node)


def help_the_stranded(net: VirtualNet) -> None:
    """Nodes whose way in died before it answered form an island of their own, which no living node has ever heard of:
    their operator names another node."""
    up = [node for node in net.nodes.values() if node.up]
    mainland = [up[0]]
    for node in mainland:  # grows while it is walked
        mainland += [other for other in up if other not in mainland and (knows(node, other) or knows(other, node))]
    for node in up:
        if node not in mainland:
            net.join(node.name, up[0].name)


def knows(node: GossipNode, other: GossipNode) -> bool:
    """Alive or dead, but this very process: a node calls on the dead it knows."""
    member = node.core.membership.get(other.name)
    return member is not None and member.life == other.core.membership.me.life


def one_fault(net: VirtualNet) -> None:
    up = [node.name for node in net.nodes.values() if node.up]
    down = [node.name for node in net.nodes.values() if not node.up]
    kind = net.rng.choice(["crash", "leave", "pause", "partition", "heal", "restart", "add"])
    if kind in ("crash", "leave") and len(up) > 2:
        getattr(net, kind)(net.rng.choice(up))
    elif kind == "pause":
        net.pause(net.rng.choice(up), net.rng.uniform(0.1, 5.0))
    elif kind == "partition":
        cut = net.rng.randrange(1, len(up)) if len(up) > 1 else 1
        net.partition(up[:cut], up[cut:])
    elif kind == "heal":
        net.heal()
    elif kind == "restart" and down:
        name = net.rng.choice(down)
        net.start(name, address=net.nodes[name].address)
        net.join(name, net.rng.choice(up))
    elif kind == "add":
        name = f"n{len(net.nodes)}"
        net.start(name)
        net.join(name, net.rng.choice(up))


def check_alternation(node: GossipNode) -> None:
    """A node is told up, down, up, down ... of every other one."""
    here: set[str] = set()
    for _, effect in node.log:
        if isinstance(effect, MemberUp):
            assert effect.member.node_id not in here
            here.add(effect.member.node_id)
        elif isinstance(effect, MemberDown):
            here.remove(effect.node_id)
    assert here == node.sees() - {node.name} or not node.up

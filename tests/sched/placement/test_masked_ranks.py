"""Nodes with masked ranks in a virtual cluster: what gossip carries, and where requests go until the ranks are back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sched.admission import Limits
from sched.gossip.load_word import ROLE_BITS, lack_bits, lack_of
from sched.gossip.record import RECORD, NodeRecord
from sched.membership.member import Member
from sched.placement.choice import Placement
from sched.placement.mooncake import MooncakePlacement
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, MIXED, demand
from tests.sched.virtual import VirtualNet

DOES = sum(ROLE_BITS.values())
NODES = ("n0", "n1", "n2")


def placed(net: VirtualNet, observer: str) -> str:
    """Where a request goes that arrives at this node now."""
    records = net.node(observer).core.records(net.now + net.nodes[observer].clock_offset)
    members = [Member(name, ("h", 1), roles=MIXED) for name in NODES]
    rows = np.frombuffer(b"".join(records[name].pack() for name in NODES), RECORD)
    view = View.of_records(net.now, members, rows, FAST, 256)
    choice = MooncakePlacement(Limits(), random.Random(0)).place(net.now, demand(), view, view.none)
    assert isinstance(choice, Placement) and choice.prefill == choice.decode
    return choice.prefill


@pytest.mark.parametrize("seed", range(4))
def test_requests_avoid_a_node_with_masked_ranks_until_they_are_back(seed):
    net = VirtualNet(seed, loss=0.1)
    nodes = {node.name: node for node in net.cluster(3)}
    load = NodeRecord(blocks_total=1000, prefill_a1=2.0**-10, decode_step_s=0.25, flags=DOES)
    speed = {"n0": 1.0, "n1": 1.2, "n2": 1.5}  # by time per token: n0 is the best one

    def tell(**lack: float) -> None:
        for name, node in nodes.items():
            one = replace(load, prefill_a1=speed[name] * load.prefill_a1, decode_step_s=speed[name] * 0.25)
            node.load = replace(one, flags=DOES | lack_bits(lack.get(name, 0.0)))

    def known(name: str, lack: float) -> bool:
        found = (node.core.record(net.now + node.clock_offset, name) for node in nodes.values())
        return all(record is not None and lack_of(record.flags) == lack for record in found)

    tell()
    assert net.run_until(lambda: net.converged() and all(known(name, 0.0) for name in NODES), 30) is not None
    for lacks, best in (
        ({}, "n0"),
        ({"n0": 0.25}, "n1"),  # 3 of 4 ranks: a third slower, and n1 is a fifth slower
        ({"n0": 0.25, "n1": 1.0}, "n0"),  # experts lost altogether: even a slow one is better
        ({"n0": 1.0, "n1": 1.0, "n2": 0.5}, "n2"),
        ({}, "n0"),
    ):
        tell(**lacks)
        told = lambda: all(known(name, lack_of(lack_bits(lacks.get(name, 0.0)))) for name in NODES)  # noqa: B023, E731
        assert net.run_until(told, 30) is not None, lacks
        assert [placed(net, name) for name in NODES] == [best] * 3, lacks

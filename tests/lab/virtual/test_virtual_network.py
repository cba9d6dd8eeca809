"""The virtual network by hand, with cores that only write down what happens to them."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, seed
from hypothesis import strategies as st

from lab.virtual.network import VirtualNetwork, VirtualNode, Weather
from sched.membership.events import Datagram, Effect, Event, SendPacket
from sched.membership.steady import SteadyClock


class Echo:
    """Sends one packet to every peer per second of its clock and notes what arrives."""

    def __init__(self, now: float, peers: list[tuple[str, int]]) -> None:
        self.next_at, self.peers = now, peers
        self.heard: list[tuple[float, str]] = []
        self.ticks: list[float] = []

    def wake_at(self) -> float:
        return self.next_at

    def handle(self, now: float, event: Event) -> list[Effect]:
        if isinstance(event, Datagram):
            self.heard.append((now, event.source[0]))
            return []
        if now < self.next_at:
            return []
        self.next_at = now + 1.0
        self.ticks.append(now)
        return [SendPacket(peer, b"hello") for peer in self.peers]


def network(size: int = 3, **weather) -> VirtualNetwork[Echo]:
    net: VirtualNetwork[Echo] = VirtualNetwork(random.Random(7), Weather(**weather), per_packet_bytes=28)
    addresses = [(f"n{i}", 1) for i in range(size)]
    for i, address in enumerate(addresses):
        offset = 1000.0 * i
        peers = [other for other in addresses if other != address]
        net.place(VirtualNode(address[0], Echo(net.now + offset, peers), address, offset))
    return net


def heard(net: VirtualNetwork[Echo], name: str, since: float = 0.0) -> list[str]:
    node = net.nodes[name]
    return [source for time, source in node.core.heard if time - node.clock_offset >= since]


def test_packets_arrive_and_are_counted_with_their_headers():
    net = network()
    net.run(9.9)
    for name, node in net.nodes.items():
        assert len(node.core.ticks) == 10 and node.bytes_sent == 20 * (5 + 28) == node.packets_sent * 33
        for other in net.nodes.keys() - {name}:  # the first packets went to nodes that were not there yet
            assert heard(net, name).count(other) == 10 - (other < name)


def test_a_cut_is_one_way_and_heals():
    net = network()
    net.cut(["n0"], ["n1"])
    net.run(4.9)
    assert "n0" not in heard(net, "n1") and "n1" in heard(net, "n0") and "n0" in heard(net, "n2")
    net.heal()
    net.run(2.0)
    assert "n0" in heard(net, "n1")


def test_a_paused_node_gets_its_packets_and_its_timer_afterwards():
    net = network()
    net.run(1.5)
    net.pause("n1", 3.0)
    net.run(2.9)
    before = len(net.nodes["n1"].core.heard)
    assert net.nodes["n1"].inbox and len(net.nodes["n1"].core.ticks) == 2
    net.run(0.2)
    assert len(net.nodes["n1"].core.heard) == before + 6 and len(net.nodes["n1"].core.ticks) == 3


def test_a_crashed_node_is_silent_and_its_address_can_be_taken_over():
    net = network()
    net.run(1.5)
    net.crash("n1")
    net.run(5.0)
    assert len(net.nodes["n1"].core.ticks) == 2 and heard(net, "n1", since=1.6) == []
    net.place(VirtualNode("fresh", Echo(net.now, []), ("n1", 1), 0.0))
    net.run(2.0)
    assert {"n0", "n2"} == set(heard(net, "fresh"))


def test_loss_and_duplicates_come_as_often_as_they_should():
    net = network(size=2, loss=0.25, duplicate=0.5)
    net.run(999.5)
    arrived = len(net.nodes["n0"].core.heard) / 1000
    assert 0.75 * 1.5 * 0.93 < arrived < 0.75 * 1.5 * 1.07


def test_a_clock_that_steps_forward_wakes_its_node_and_one_that_steps_back_lets_it_sleep():
    net = network()
    net.run(1.5)
    net.step_clock("n0", 10.0)
    net.step_clock("n1", -10.0)
    net.run(0.1)
    assert len(net.nodes["n0"].core.ticks) == 3
    net.run(5.0)
    assert len(net.nodes["n1"].core.ticks) == 2 and len(net.nodes["n2"].core.ticks) == 7


@seed(1)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_a_steady_clock_never_goes_back_and_keeps_every_step_forward(readings):
    clock = SteadyClock(readings[0])
    times = [clock.at(reading) for reading in readings]
    for (before, after), (read, reads) in zip(pairwise(times), pairwise(readings), strict=True):
        assert after - before >= -1e-6
        assert abs((after - before) - max(0.0, reads - read)) < 1e-3
    assert abs(clock.theirs(times[-1]) - readings[-1]) < 1e-3


def test_a_tick_is_fed_at_the_start():
    net = network(size=1)
    assert net.events == 1 and net.nodes["n0"].core.ticks == [0.0]

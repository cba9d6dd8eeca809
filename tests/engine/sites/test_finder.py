"""The site of a request as its acceptor finds it: unmeasured sites are asked, bound requests stay."""

from __future__ import annotations

import numpy as np

from engine.sites.finder import RETRY_S, SiteFinder, Wanted
from sched.membership.member import Member
from sched.placement.sites.distances import MEASURE_S
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, Node, demand, node

BUSY_S = 5.0


class World:
    """`a1` here is busy, `b1` at the other site is not."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.finder = SiteFinder("a", lambda member: self.asked.append(member.node_id))
        self.members = [Member(name, ("h", 1), info={"site": name[0]}) for name in ("a1", "b1")]

    def choose(self, now: float = NOW, bound: bool = False, *nodes: Node, tried: tuple[str, ...] = ()) -> str:
        return self.both(now, bound, *nodes, tried=tried)[0]

    def both(self, now: float = NOW, bound: bool = False, *nodes: Node, tried: tuple[str, ...] = ()):
        given = nodes or (node("a1", wait_s=BUSY_S), node("b1"))
        view = View(NOW, [candidate for candidate, _ in given], FAST, 100)
        matched = np.array([float(local) for _, local in given])
        return self.finder.choose(now, view, self.members, matched, Wanted(demand(), demand(), bound), tried)

    def hear(self, now: float, seconds: float) -> None:
        self.finder.heard(now, self.members[1], seconds)


def test_a_site_takes_no_request_before_its_distance_is_known():
    world = World()
    assert world.choose() == "a"
    assert world.asked == ["b1"]
    world.hear(NOW, 0.1)
    assert world.choose() == "b"
    world.hear(NOW + 60.0, BUSY_S + 1)
    assert world.choose(NOW + 60.0) == "a"


def test_a_site_is_asked_without_a_request_until_its_distance_is_known():
    world = World()
    for now in (NOW, NOW + RETRY_S / 2, NOW + RETRY_S):
        assert world.finder.unknown(now, world.members)
    assert world.asked == ["b1", "b1"]
    world.hear(NOW + RETRY_S, 0.1)
    assert not world.finder.unknown(NOW + 60 * RETRY_S, world.members), "then requests keep it fresh"
    assert not world.finder.unknown(NOW, world.members[:1])
    assert world.asked == ["b1", "b1"]
    assert world.choose(NOW + RETRY_S) == "b", "the first request too"


def test_a_silent_site_takes_no_request_until_one_of_its_nodes_answers():
    world = World()
    world.hear(NOW, 0.1)
    assert world.choose() == "b"
    world.finder.silent("b")
    for now in (NOW, NOW + RETRY_S / 2, NOW + RETRY_S):
        assert world.choose(now) == "a"
        assert world.finder.unknown(now, world.members)
    assert world.asked == ["b1", "b1"], "in the background, once a second"
    world.hear(NOW + RETRY_S, 0.1)
    assert world.choose(NOW + RETRY_S) == "b" and not world.finder.unknown(NOW + RETRY_S, world.members)
    world.finder.silent("a")
    assert world.choose(NOW, True) == "a", "the own site is where a request is anyway"


def test_a_silent_site_takes_what_no_other_one_can_and_is_tried_once_per_request():
    world = World()
    world.hear(NOW, 0.1)
    assert world.both() == ("b", True), "a could take it, too"
    full = node("a1", roles=("store",)), node("b1")
    assert world.both(NOW, False, *full) == ("b", False)
    world.finder.silent("b")
    assert world.both(NOW, False, *full) == ("b", False), "it may be slow"
    assert world.both(NOW, False, *full, tried=("b",)) == ("a", False)
    world.hear(NOW, 0.1)
    assert world.choose(tried=("b",)) == "a", "although another of its nodes answers"


def test_a_site_that_has_gone_is_forgotten():
    world = World()
    world.hear(NOW, 0.1)
    world.finder.silent("b")
    world.finder.keep({"a"})
    assert world.finder.unknown(NOW, world.members), "it may have returned by another way"
    world.hear(NOW, 0.2)
    assert world.choose() == "b"


def test_a_site_that_does_not_answer_is_asked_again_but_not_for_every_request():
    world = World()
    for _ in range(5):
        world.choose()
    world.choose(NOW + RETRY_S)
    assert world.asked == ["b1", "b1"]
    world.hear(NOW + RETRY_S, 0.1)
    world.choose(NOW + RETRY_S + MEASURE_S / 2)
    assert len(world.asked) == 2
    world.choose(NOW + RETRY_S + MEASURE_S)
    assert len(world.asked) == 3


def test_the_nodes_of_a_silent_site_are_asked_in_turn():
    world = World()
    world.members.append(Member("b2", ("h", 1), info={"site": "b"}))
    for turn in range(3):
        world.choose(NOW + turn * RETRY_S, False, node("a1", wait_s=BUSY_S), node("b1"), node("b2"))
    assert world.asked == ["b1", "b2", "b1"], "the first one may be cut off, or hang"


def test_a_bound_request_stays_however_busy_its_site_is():
    world = World()
    world.hear(NOW, 0.001)
    assert world.choose() == "b"
    assert world.choose(NOW, True) == "a"


def test_a_prefix_there_draws_the_request_and_one_here_keeps_it():
    world = World()
    world.hear(NOW, 0.5)
    assert world.choose(NOW, False, node("a1"), node("b1", local_tokens=1600)) == "b"
    assert world.choose(NOW, False, node("a1", local_tokens=1600), node("b1", local_tokens=1600)) == "a"


def test_if_no_site_can_take_it_the_own_one_is_named():
    world = World()
    world.hear(NOW, 0.1)
    assert world.choose(NOW, False, node("a1", roles=("prefill",)), node("b1", roles=("decode",))) == "a"


def test_one_site_is_not_several():
    finder = World().finder
    assert finder.several({"a", "b"}) and finder.several({"b"})
    assert not finder.several({"a"}) and not finder.several(set())

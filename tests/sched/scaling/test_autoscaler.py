"""Nodes that start and leave under a virtual clock: enough for the load, never out of bounds, no flapping."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sched.classes import CLASSES
from sched.role_change import BOTH
from sched.scaling.autoscaler import PREFIX, Autoscaler, acting
from sched.scaling.bounds import Bounds
from sched.scaling.crew import Drain, Effect, Rules, Start, Stop
from sched.scaling.need import NodeLoad

OUT_S, IN_S, START_S = 10.0, 60.0, 30.0
SEATS = 16
PARTS = 2
"""Of a second, so that the load is not only looked at when requests have just arrived."""
DOES = {"prefill": frozenset({"prefill"}), "decode": frozenset({"decode"}), "mixed": BOTH}


def rules(*bounds: Bounds, in_s: float = IN_S) -> Rules:
    return Rules(bounds, CLASSES["standard"], OUT_S, in_s, 2 * START_S)


@dataclass
class Virtual:
    """Nodes of one role that compute prompts of `service_s` seconds and decode answers of `answer_s` seconds. Each
    prompt goes to the node with the least work, each answer to the node with the fewest."""

    role: str
    least: int
    most: int
    in_s: float = IN_S
    service_s: float = 0.5
    answer_s: float = 20.0
    seed: int = 0
    now: float = 0.0
    work: dict[str, float] = field(default_factory=dict)  # seconds, by node that is on
    running: dict[str, list[float]] = field(default_factory=dict)  # ends of answers
    starting: dict[str, float] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    effects: list[tuple[float, Effect]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        for i in range(self.least):
            self.on(f"{PREFIX}{self.role}-{i}")
        self.core = Autoscaler(rules(Bounds(self.role, self.least, self.most), in_s=self.in_s))

    def on(self, name: str) -> None:
        self.work[name], self.running[name] = 0.0, []

    @property
    def takers(self) -> list[str]:
        return [name for name in self.work if name not in self.draining]

    def loads(self) -> list[NodeLoad]:
        does = DOES[self.role]
        on = [
            NodeLoad(
                node_id=name,
                can=does,
                does=does,
                work_s=work,
                running_soon=min(SEATS, len(self.running[name])),
                max_running=SEATS,
                role=self.role,
                ready=True,
                draining=name in self.draining,
                running=min(SEATS, len(self.running[name])),
                waiting=max(0, len(self.running[name]) - SEATS),
            )
            for name, work in self.work.items()
        ]
        blank = {"can": frozenset(), "does": frozenset(), "work_s": 0.0, "running_soon": 0, "max_running": 0}
        return on + [NodeLoad(node_id=name, role=self.role, ready=False, **blank) for name in self.starting]

    def run(self, seconds: int, rate: float) -> None:
        """`rate`: requests per second."""
        for _ in range(seconds):
            for _ in range(PARTS):
                self.now += 1 / PARTS
                self._serve(rate / PARTS)
            for name in [name for name, since in self.starting.items() if self.now - since >= START_S]:
                del self.starting[name]
                self.on(name)
            for effect in self.core.step(self.now, self.loads(), acts=True):
                self._carry_out(effect)

    def _serve(self, rate: float) -> None:
        for name in self.work:
            self.work[name] = max(0.0, self.work[name] - 1 / PARTS)
            self.running[name] = [end for end in self.running[name] if end > self.now]
        count = int(rate) + (self.rng.random() < rate % 1)
        for _ in range(count):
            if "prefill" in DOES[self.role]:
                self.work[min(self.takers, key=self.work.__getitem__)] += self.service_s
            if "decode" in DOES[self.role]:
                self.running[min(self.takers, key=lambda name: len(self.running[name]))].append(
                    self.now + self.answer_s
                )
        for name in [name for name in self.draining if not self.work[name] and not self.running[name]]:
            self.draining.discard(name)
            del self.work[name], self.running[name]

    def _carry_out(self, effect: Effect) -> None:
        self.effects.append((self.now, effect))
        if isinstance(effect, Start):
            assert effect.node not in self.work and effect.node not in self.starting
            self.starting[effect.node] = self.now
        elif isinstance(effect, Drain):
            self.draining.add(effect.node)
        assert self.least <= len(self.takers), "never below the least"
        assert len(self.work) - len(self.draining) + len(self.starting) <= self.most

    def when(self, kind: type) -> list[float]:
        return [at for at, effect in self.effects if isinstance(effect, kind)]


@pytest.mark.parametrize(("role", "busy"), [("prefill", 4), ("decode", 10), ("mixed", 14)])
def test_nodes_follow_a_load_that_rises_and_falls(role, busy):
    """busy: nodes that 8 prompts of half a second, or 160 answers on 16 seats, keep busy."""
    virtual = Virtual(role, 1, 30)
    virtual.run(300, 1.0)
    low = len(virtual.takers)
    virtual.run(600, 8.0)
    high = len(virtual.takers)
    assert low <= 3 and busy < high <= 1.6 * busy + 2
    virtual.run(1500, 1.0)
    assert len(virtual.takers) <= low + 1 and not virtual.starting and not virtual.draining
    stops = {effect.node for _, effect in virtual.effects if isinstance(effect, Stop)}
    assert stops == {effect.node for _, effect in virtual.effects if isinstance(effect, Drain)}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(DOES)), st.floats(0.2, 12.0), st.integers(0, 1000))
def test_a_constant_load_does_not_flap(role, rate, seed):
    """With the default of 300 s before a node leaves: in 20 minutes after the load has settled, a rare fluctuation may
    start a node, and it may leave again."""
    virtual = Virtual(role, 1, 30, in_s=300.0, seed=seed)
    virtual.run(600, rate)
    settled = virtual.now
    virtual.run(1200, rate)
    assert len([at for at in virtual.when(Start) if at > settled]) <= 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(20, 200)), min_size=2, max_size=6), st.integers(0, 99))
def test_bounds_and_pauses_hold_for_any_load(phases, seed):
    virtual = Virtual("mixed", 2, 5, seed=seed)
    for rate, seconds in phases:
        virtual.run(seconds, rate)
    drains = virtual.when(Drain)
    assert all(later - one >= IN_S for one, later in pairwise(sorted(set(drains))))
    starts = virtual.when(Start)
    assert all(not (0 < at - start < IN_S) for at in drains for start in starts), "it has just been started"


def node(name: str, role: str = "decode", running: int = 0, **more) -> NodeLoad:
    does = DOES[role]
    known = {"work_s": 0.0, "running_soon": running, "max_running": SEATS, "running": running, "ready": True} | more
    return NodeLoad(node_id=name, can=does, does=does, role=role, **known)


def steps(core: Autoscaler, nodes: list[NodeLoad], begin: int, seconds: int, acts: bool = True) -> list[Effect]:
    return [effect for second in range(begin, begin + seconds) for effect in core.step(second, nodes, acts)]


BUSY = [node("a", running=16), node("b", running=16)]


def test_what_starts_is_not_capacity_but_is_not_started_twice():
    core = Autoscaler(rules(Bounds("decode", 1, 8)))
    first = steps(core, BUSY, 0, 12)
    assert first == [Start("decode", f"{PREFIX}decode-0")], "two nodes hold 32 requests, and a few more may come"
    coming = [*BUSY, node(f"{PREFIX}decode-0", ready=False)]
    assert steps(core, coming, 12, 40) == []
    assert core.state()["decode"] == {"needed": 3, "ready": 2, "starting": 1, "draining": 0}


def test_a_node_that_is_not_ready_in_time_is_stopped_and_the_next_try_waits_longer():
    core = Autoscaler(rules(Bounds("decode", 1, 3)))
    effects = {second: found for second in range(400) for found in core.step(second, BUSY, acts=True)}
    starts = [second for second, effect in effects.items() if isinstance(effect, Start)]
    assert {effect.node for effect in effects.values()} == {f"{PREFIX}decode-0"}
    assert [type(effect) for effect in effects.values()][:3] == [Start, Stop, Start]
    pauses = [later - one for one, later in pairwise(starts)]
    assert pauses == sorted(pauses) and pauses[0] > 2 * START_S


def test_a_failed_command_waits_too():
    core = Autoscaler(rules(Bounds("decode", 1, 3)))
    (start,) = steps(core, BUSY, 0, 12)
    core.failed(12, start)
    assert steps(core, BUSY, 12, 2 * int(OUT_S)) == []
    assert steps(core, BUSY, 32, 10) == [start]


def test_starts_that_fail_together_count_once():
    """A launcher that rests for a moment must not keep a large role waiting for ten minutes."""
    core = Autoscaler(rules(Bounds("decode", 6, 8)))
    starts = steps(core, [node("own")], 0, 12)
    assert len(starts) == 5
    for start in starts:
        core.failed(12, start)
    assert steps(core, [node("own")], 12, 2 * int(OUT_S)) == []
    assert steps(core, [node("own")], 32, 10) == starts
    for start in starts:
        core.failed(42, start)
    assert steps(core, [node("own")], 42, 4 * int(OUT_S)) == [], "the second round waits twice as long"
    assert steps(core, [node("own")], 82, 10) == starts


def test_a_name_whose_stop_failed_is_not_given_to_a_new_node():
    """The stop is repeated, and would end the node that starts."""
    core = Autoscaler(rules(Bounds("decode", 1, 8)))
    name = f"{PREFIX}decode-0"
    steps(core, [*BUSY, node(name, draining=True)], 0, 9)
    (stop,) = steps(core, BUSY, 9, 1)
    core.failed(9.5, stop)
    effects = steps(core, BUSY, 10, 30)
    assert effects[0] == Start("decode", f"{PREFIX}decode-1") and Stop("decode", name) in effects
    assert Start("decode", name) not in effects


def test_a_node_that_loads_for_too_long_is_stopped_again_if_nobody_could_stop_it():
    core = Autoscaler(rules(Bounds("decode", 1, 3)))
    (start,) = steps(core, BUSY, 0, 12)
    loads = [*BUSY, node(start.node, ready=False)]
    (stop,) = steps(core, loads, 12, 62)
    assert stop == Stop("decode", start.node, late=True)
    core.failed(74, stop)
    assert [one for one in steps(core, loads, 74, 30) if isinstance(one, Stop)] == [stop]
    core.failed(104, stop)
    ready = [*BUSY, node(start.node)]
    assert not [one for one in steps(core, ready, 104, 30) if isinstance(one, Stop)], "it is ready after all"


def test_only_nodes_that_a_start_named_leave_the_dearest_first():
    core = Autoscaler(rules(Bounds("decode", 1, 8)))
    names = [f"{PREFIX}decode-{i}" for i in range(2)]
    nodes = [node("hand-made", running=14), node(names[0], cost=3.0), node(names[1])]
    assert steps(core, nodes, 0, 70) == [Drain("decode", names[0])], "two nodes are enough for 14 answers and a margin"
    nodes[0] = node("hand-made")
    assert steps(Autoscaler(rules(Bounds("decode", 1, 8))), nodes, 0, 70) == [Drain("decode", name) for name in names]
    nodes = [node("hand-made"), node("too")]
    assert steps(Autoscaler(rules(Bounds("decode", 1, 8))), nodes, 0, 500) == []


def test_a_draining_node_is_no_capacity_and_another_waits_for_it():
    core = Autoscaler(rules(Bounds("decode", 1, 8)))
    names = [f"{PREFIX}decode-{i}" for i in range(3)]
    nodes = [node(names[0], draining=True), *map(node, names[1:])]
    assert steps(core, nodes, 0, 200) == []
    assert core.state()["decode"]["ready"] == 2
    assert core.step(200, nodes[1:], acts=True)[0] == Stop("decode", names[0])


def test_a_draining_node_is_one_of_the_most_until_it_has_left():
    core = Autoscaler(rules(Bounds("decode", 1, 4)))
    busy = [node(f"{PREFIX}decode-{i}", running=SEATS) for i in range(2)]
    leaves = node(f"{PREFIX}decode-2", draining=True)
    started = [one.node for one in steps(core, [*busy, leaves], 0, 30) if isinstance(one, Start)]
    assert started == [f"{PREFIX}decode-3"], "three that run and one that leaves"


def test_a_stop_that_failed_is_tried_again_unless_the_node_is_back():
    core = Autoscaler(rules(Bounds("decode", 1, 4)))
    own, name = node("own"), f"{PREFIX}decode-0"
    steps(core, [own, node(name, draining=True)], 0, 2)
    (stop,) = steps(core, [own], 2, 1)
    assert stop == Stop("decode", name)
    core.failed(3.0, stop)
    assert steps(core, [own], 3, int(OUT_S) - 1) == []
    assert steps(core, [own], 3 + int(OUT_S), 1) == [stop]
    core.failed(14.0, stop)
    assert not [one for one in steps(core, [own, node(name)], 15, 30) if isinstance(one, Stop)]


def test_who_does_not_act_goes_on_at_once_when_it_is_its_turn():
    acts, looks = (Autoscaler(rules(Bounds("decode", 1, 8))) for _ in range(2))
    assert steps(looks, BUSY, 0, 30, acts=False) == []
    (first,) = steps(acts, BUSY, 0, 12)
    assert looks.step(30, BUSY, acts=True) == [first], "the same name: the command starts it only once"


def test_all_nodes_agree_who_acts():
    assert acting(["a", "b", "c"]) == acting(["c", "b", "a"]) in {"a", "b", "c"}
    assert acting([]) is None


def test_a_role_that_all_nodes_lost_gets_its_least_number_again():
    core = Autoscaler(rules(Bounds("decode", 2, 8)))
    assert steps(core, [node("p", "prefill")], 0, 12) == [Start("decode", f"{PREFIX}decode-{i}") for i in range(2)]

"""Ranks that start and leave under a virtual clock: enough for the load, never out of bounds, no flapping."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sched.classes import CLASSES
from sched.role_change import BOTH
from sched.scaling.bounds import Bounds
from sched.scaling.crew import Drain, Effect, Rules, Start, Stop
from sched.scaling.need import NodeLoad
from sched.scaling.width import RANK, Rank, Width

OUT_S, IN_S, START_S, COMES_S, LEAVES_S = 10.0, 60.0, 90.0, 30.0, 2.0
LEAST, MOST, SEATS = 2, 6, 16
PARTS = 2
"""Of a second, so that the load is not only looked at when requests have just arrived."""
OBJECTIVE = CLASSES["standard"]


def rules(in_s: float = IN_S) -> Rules:
    return Rules((Bounds(RANK, LEAST, MOST),), OBJECTIVE, OUT_S, in_s, START_S)


def load(running: int = 0, waiting: int = 0, **more) -> NodeLoad:
    known = {"work_s": 0.0, "running_soon": running, "max_running": SEATS, "ready": True} | more
    return NodeLoad(node_id="n", can=BOTH, does=BOTH, role="mixed", running=running, waiting=waiting, **known)


@dataclass
class Virtual:
    """A node whose steps take `own_s`, and `experts_s` over the number of ranks, per prompt and per step. Requests of
    `tokens` tokens wait for a seat."""

    in_s: float = IN_S
    tokens: int = 200
    prompt_s: tuple[float, float] = (0.05, 0.6)
    step_s: tuple[float, float] = (0.01, 0.06)
    told: bool = True  # the experts' part of a step
    seed: int = 0
    now: float = 0.0
    work: float = 0.0  # prompts in the queue
    left: list[float] = field(default_factory=list)  # tokens, by request
    starting: dict[str, float] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)
    effects: list[tuple[float, Effect]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.core = Random(self.seed), Width("n", rules(self.in_s))

    @property
    def width(self) -> int:
        return LEAST + len(self.joined)

    def takes(self, parts: tuple[float, float]) -> float:
        return parts[0] + parts[1] / self.width

    def run(self, seconds: int, rate: float) -> None:
        """`rate`: requests per second."""
        for _ in range(seconds):
            for _ in range(PARTS):
                self.now += 1 / PARTS
                self._serve(rate / PARTS)
            self._come_and_go()
            queue_s = self.work * self.takes(self.prompt_s)
            running, waiting = min(SEATS, len(self.left)), max(0, len(self.left) - SEATS)
            node = load(running, waiting, work_s=queue_s, step_s=self.takes(self.step_s))
            ranks = [Rank(number, name, True) for name, number in self.joined.items()]
            experts_s = self.step_s[1] / self.width if self.told else 0.0
            for effect in self.core.step(self.now, node, ranks, experts_s):
                self._carry_out(effect)

    def _serve(self, rate: float) -> None:
        count = int(rate) + (self.rng.random() < rate % 1)
        self.work += count
        self.left += [float(self.tokens)] * count
        prompts = min(self.work, 1 / PARTS / self.takes(self.prompt_s))
        self.work -= prompts
        steps = (1 / PARTS - prompts * self.takes(self.prompt_s)) / self.takes(self.step_s)
        self.left = [tokens - steps for tokens in self.left[:SEATS] if tokens > steps] + self.left[SEATS:]

    def _come_and_go(self) -> None:
        for name in [name for name, since in self.starting.items() if self.now - since >= COMES_S]:
            del self.starting[name]
            self.joined[name] = min({*range(LEAST, MOST)} - {*self.joined.values()})
        for name in [name for name, since in self.leaving.items() if self.now - since >= LEAVES_S]:
            del self.leaving[name], self.joined[name]

    def _carry_out(self, effect: Effect) -> None:
        self.effects.append((self.now, effect))
        if isinstance(effect, Start):
            assert effect.node not in self.joined and effect.node not in self.starting
            self.starting[effect.node] = self.now
        elif isinstance(effect, Drain):
            self.leaving[effect.node] = self.now
        assert self.width - len(self.leaving) >= LEAST and self.width + len(self.starting) <= MOST

    def when(self, kind: type) -> list[float]:
        return [at for at, effect in self.effects if isinstance(effect, kind)]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("slow", ["prompts", "steps"])
def test_ranks_follow_a_load_that_rises_and_falls(slow, told):
    parts = {"tokens": 1, "prompt_s": (0.05, 0.6)} if slow == "prompts" else {"prompt_s": (0.0, 0.001)}
    virtual = Virtual(**parts, told=told)
    virtual.run(300, 0.1)
    assert virtual.width == LEAST
    virtual.run(600, 4.0)
    assert LEAST + 2 <= virtual.width <= MOST
    virtual.run(1200, 0.1)
    assert virtual.width == LEAST and not virtual.starting
    stopped = {effect.node for _, effect in virtual.effects if isinstance(effect, Stop)}
    assert stopped == {effect.node for _, effect in virtual.effects if isinstance(effect, Drain)}


@settings(max_examples=4, deadline=None)
@given(st.floats(0.1, 6.0), st.integers(0, 1000))
def test_a_constant_load_does_not_flap(rate, seed):
    """With the default of 300 s before a rank leaves: in 20 minutes after the load has settled, a rare fluctuation may
    start a rank, and it may leave again."""
    virtual = Virtual(in_s=300.0, seed=seed)
    virtual.run(900, rate)
    settled = virtual.now
    virtual.run(1200, rate)
    assert len([at for at in virtual.when(Start) if at > settled]) <= 1


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 8.0), st.integers(20, 120)), min_size=2, max_size=6), st.integers(0, 99))
def test_bounds_and_pauses_hold_for_any_load(phases, seed):
    virtual = Virtual(seed=seed)
    for rate, seconds in phases:
        virtual.run(seconds, rate)
    drains = virtual.when(Drain)
    assert all(later - one >= IN_S for one, later in pairwise(sorted(set(drains))))
    assert all(not (0 < at - start < IN_S) for at in drains for start in virtual.when(Start))


BUSY = load(running=SEATS, waiting=2 * SEATS)


def steps(
    core: Width, node: NodeLoad, ranks: list[Rank], begin: int, seconds: int, experts_s: float = 0.0
) -> list[Effect]:
    return [effect for now in range(begin, begin + seconds) for effect in core.step(now, node, ranks, experts_s)]


def test_a_rank_that_does_not_come_is_given_up_and_asked_for_again_ever_later():
    core = Width("n", Rules((Bounds(RANK, 2, 3),), OBJECTIVE, OUT_S, IN_S, START_S))
    effects = [(second, effect) for second in range(1200) for effect in core.step(second, BUSY, [])]
    assert [effect for _, effect in effects][:3] == [
        Start(RANK, "n-rank-0"),
        Stop(RANK, "n-rank-0", late=True),
        Start(RANK, "n-rank-0"),
    ]
    pauses = [later - one for one, later in pairwise(at for at, effect in effects if isinstance(effect, Start))]
    assert len(pauses) >= 3 and pauses == sorted(set(pauses)) and pauses[0] > START_S


def test_a_command_that_failed_is_called_again():
    core = Width("n", Rules((Bounds(RANK, 2, 3),), OBJECTIVE, OUT_S, IN_S, START_S))
    (start,) = steps(core, BUSY, [], 0, 12)
    core.failed(12, start)
    assert steps(core, BUSY, [], 12, 2 * int(OUT_S)) == []
    assert steps(core, BUSY, [], 32, 10) == [start]
    here = [Rank(2, "n-rank-0", True)]
    (drain,) = steps(core, load(), here, 42, 500)
    assert drain == Drain(RANK, "n-rank-0") and core.counts["draining"] == 1
    core.failed(542, drain)
    assert steps(core, load(), here, 542, int(IN_S) + 2) == [drain]
    assert steps(core, load(), [], 700, 2) == [Stop(RANK, "n-rank-0")], "what it ran on is free"


def test_steps_that_miss_their_objective_need_ranks_and_an_idle_node_none():
    """A node of two ranks whose steps take 0.13 s with one request; the objective is 0.1 s."""
    core = Width("n", rules())
    assert steps(core, load(step_s=0.13), [], 0, 300) == [], "nothing decodes"
    found = steps(core, load(running=1, step_s=0.13), [], 300, 300)
    assert found[:1] == [Start(RANK, "n-rank-0")] and core.counts["needed"] > LEAST


def test_a_rank_without_which_steps_would_miss_their_objective_stays():
    """Of three ranks with steps of 0.08 s: two would take 0.12 s, and the objective is 0.1 s."""
    ranks = [Rank(2, "n-rank-0", True)]
    assert steps(Width("n", rules()), load(running=1, step_s=0.08), ranks, 0, 600) == []
    assert steps(Width("n", rules()), load(running=1, step_s=0.02), ranks, 0, 600) == [Drain(RANK, "n-rank-0")]


def test_attention_that_takes_longer_than_the_objective_demands_no_ranks():
    """Steps of 0.13 s, of which two ranks' experts take 0.02 s: attention alone misses the objective of 0.1 s."""
    node = load(running=1, step_s=0.13)
    assert steps(Width("n", rules()), node, [], 0, 600, experts_s=0.02) == []
    everybody = [Rank(2 + i, f"n-rank-{i}", True) for i in range(MOST - LEAST)]
    experts_s = 0.056 / MOST
    found = steps(Width("n", rules()), load(running=1, step_s=0.11 + experts_s), everybody, 0, 600, experts_s)
    assert [effect.node for effect in found if isinstance(effect, Drain)] == ["n-rank-3", "n-rank-2", "n-rank-1"]


def test_the_rest_of_a_step_leaves_less_of_the_objective_for_the_experts():
    """Steps of two ranks take 0.13 s, the objective is 0.1 s. If 0.03 s are attention, more ranks are needed than if
    all of it were shared."""
    core, node = Width("n", rules()), load(running=1, step_s=0.13)
    assert steps(core, node, [], 0, 300)[:1] == [Start(RANK, "n-rank-0")] and core.counts["needed"] == 3
    core = Width("n", rules())
    assert steps(core, node, [], 0, 300, experts_s=0.1) and core.counts["needed"] == 4
    four = [Rank(2 + i, f"n-rank-{i}", True) for i in range(2)]
    assert steps(Width("n", rules()), load(running=1, step_s=0.08), four, 0, 600, experts_s=0.05) == []


def test_only_ranks_that_a_start_named_leave_the_last_first():
    core = Width("n", rules())
    ranks = [Rank(2, "", True), Rank(3, "n-rank-1", True), Rank(4, "n-rank-0", True), Rank(5, "m-rank-0", True)]
    assert steps(core, load(), ranks, 0, 70) == [Drain(RANK, "n-rank-0"), Drain(RANK, "n-rank-1")]
    strange = [Rank(2, "n-rank-0/../x", True), Rank(3, "n-rank-", True)]
    assert steps(Width("n", rules()), load(), strange, 0, 500) == []


def test_a_process_that_got_one_of_the_first_places_stays_and_another_is_started():
    core = Width("n", rules())
    (*first, _) = [effect.node for effect in steps(core, BUSY, [], 0, 12)]
    ranks = [Rank(1, first[0], False), *(Rank(2 + i, name, True) for i, name in enumerate(first[1:]))]
    found = steps(core, BUSY, ranks, 12, 400)
    assert not [effect for effect in found if effect.node in first]
    core = Width("n", rules())
    assert steps(core, load(), [Rank(1, "n-rank-0", True)], 0, 500) == []


def test_a_node_that_leaves_starts_nobody():
    core = Width("n", rules())
    assert steps(core, load(running=SEATS, waiting=2 * SEATS, draining=True), [], 0, 100) == []


def test_what_was_started_for_a_node_is_known():
    core = Width("n", rules())
    assert core.started == set()
    names = {effect.node for effect in steps(core, BUSY, [Rank(2, "", True)], 0, 12)}
    assert core.started == names == {"n-rank-0", "n-rank-1", "n-rank-2"}

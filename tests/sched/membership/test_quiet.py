"""Which nodes are asked for a sign of life, and which are late, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from sched.membership.quiet import ANSWERS, LEAST_S, LOOK_S, MOST_S, PERIOD_S, QUIET_S, Quiet

Says = Callable[[float], bool]


class World:
    """One node. An observer looks every PERIOD_S. `answer_s(now)`: how long the answer to a question takes, None = it
    never comes."""

    def __init__(self, answer_s: Callable[[float], float | None]) -> None:
        self.quiet, self.now = Quiet(), 0.0
        self.answer_s = answer_s
        self.due: list[float] = []
        self.asked: list[float] = []
        self.late: list[float] = []

    def run(self, until: float, says: Says = lambda now: False, pause_s: float = PERIOD_S) -> None:
        while self.now < until:
            self.now += pause_s
            for _ in [at for at in self.due if at <= self.now]:
                self.quiet.answered("n")
            self.due = [at for at in self.due if at > self.now]
            if says(self.now):
                self.quiet.heard("n")
            asked, late = self.quiet.look(self.now, ["n"])
            if asked:
                self.asked.append(self.now)
                if (seconds := self.answer_s(self.now)) is not None:
                    self.due.append(self.now + seconds)
            self.late += [self.now] * len(late)


def cut_at(at: float, answer_s: float) -> Callable[[float], float | None]:
    return lambda now: answer_s if now + answer_s < at else None


@pytest.mark.parametrize(("answer_s", "limit_s"), [(0.001, LEAST_S), (0.2, ANSWERS * 0.2), (0.9, MOST_S)])
def test_a_node_that_stops_is_late_by_the_distance_and_jitter_of_its_answers(answer_s: float, limit_s: float):
    world = World(cut_at(20.0, answer_s))
    world.run(30.0, says=lambda now: now < 20.0 and int(now / PERIOD_S) % 40 == 0)
    (late,) = world.late
    assert limit_s < late - 20.0 + answer_s + QUIET_S + 2 * PERIOD_S
    assert late - 20.0 < limit_s + QUIET_S + ANSWERS * PERIOD_S + 4 * PERIOD_S
    assert world.quiet.late("n")


def test_a_stream_that_stops_is_late_as_soon():
    """Its tokens came so often that it was asked once only, at the begin."""
    world = World(cut_at(20.0, 0.01))
    world.run(25.0, says=lambda now: 0.5 < now < 20.0)
    assert sum(at < 20.0 for at in world.asked) < 6
    assert LEAST_S < world.late[0] - 20.0 < LEAST_S + QUIET_S + 5 * PERIOD_S


def test_a_node_that_says_nothing_and_answers_is_never_late():
    """It computes one long prompt after the other."""
    world = World(lambda now: 0.02)
    world.run(600.0)
    assert world.late == [] and len(world.asked) > 1000


def test_a_node_that_speaks_and_does_not_answer_is_not_late():
    world = World(lambda now: None)
    world.run(60.0, says=lambda now: True)
    assert world.late == []


def test_a_node_that_was_never_heard_has_the_longest_time():
    world = World(lambda now: None)
    world.run(5.0)
    assert MOST_S < world.late[0] < MOST_S + 4 * PERIOD_S


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_gets_busy_makes_nobody_late(seed: int):
    """An hour, in which answers take up to ANSWERS times as long as those before them, and the observer is held up."""
    rng = random.Random(seed)
    world = World(lambda now: rng.uniform(0.0, 0.6) * min(1.0, 0.1 + now / 60))
    for turn in range(600):
        world.run(6.0 * (turn + 1), pause_s=rng.choice([PERIOD_S, PERIOD_S, 0.5]))
    assert world.late == []


def test_one_stall_of_half_a_second_makes_nobody_late():
    """Answers took a millisecond for a minute, as on an idle machine."""
    world = World(lambda now: LEAST_S - PERIOD_S if 60.0 <= now < 61.0 else 0.001)
    world.run(90.0)
    assert world.late == [] and max(b - a for a, b in pairwise(world.asked)) > LEAST_S - PERIOD_S


def test_the_pause_of_an_observer_is_not_the_silence_of_others():
    world = World(lambda now: 0.01)
    world.run(10.0)
    world.due.clear()
    world.now += 60.0  # the answer waits in its socket
    world.quiet.look(world.now, ["n"])
    assert not world.quiet.late("n")
    world.quiet.answered("n")
    assert world.quiet.limit_s("n") <= max(LEAST_S, ANSWERS * 2 * LOOK_S)


def test_a_late_node_that_speaks_is_not_late_and_may_be_so_again():
    world = World(cut_at(10.0, 0.01))
    world.run(12.0)
    assert len(world.late) == 1 and world.quiet.late("n")
    world.run(13.0, says=lambda now: True)
    assert not world.quiet.late("n")
    world.run(20.0)
    assert len(world.late) == 2
    world.quiet.forget("n")
    assert not world.quiet.late("n")

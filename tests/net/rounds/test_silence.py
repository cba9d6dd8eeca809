"""Which ranks are given up, in virtual time: those that are silent, and never those that are only slow."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from net.rounds.silence import ANSWER_S, LEAST_ANSWER_S, LEAST_S, LOOK_S, MOST_S, Silence

LOOK = LOOK_S / 2


def run(
    silence: Silence, beats_at: list[list[float]], answers_at: list[float], looks: list[float], work: int = 0
) -> dict[int, float]:
    """One round from time 0: rank r beats at beats_at[r], in order, and answers at answers_at[r]; the observer looks at
    `looks`. Returns when which ranks were given up."""
    given_up: dict[int, float] = {}
    begun = looks[0]
    silence.begin(begun, {rank: bisect_right(times, begun) for rank, times in enumerate(beats_at)}, work)
    for now in looks[1:]:
        pending = [rank for rank, at in enumerate(answers_at) if at > now and rank not in given_up]
        if not pending:
            break
        late = silence.look(now, {rank: bisect_right(beats_at[rank], now) for rank in pending})
        given_up |= dict.fromkeys(late, now)
    silence.end(whole=not given_up)
    return given_up


def every(step: float, until: float, since: float = 0.0) -> list[float]:
    return [since + step * i for i in range(int((until - since) / step) + 1)]


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_stops_is_given_up_soon(seed):
    """However long its pauses were before; the other one is not."""
    rng = random.Random(seed)
    stopped = rng.uniform(0.0, 3.0)
    pause = rng.choice([0.01, 0.05, 0.15])
    beats = [every(pause, stopped), every(0.01, 10)]
    found = run(Silence(), beats, [99.0, 9.0], every(LOOK, 10))
    assert set(found) == {0}
    limit = min(MOST_S, max(LEAST_S, 8 * (pause + LOOK_S)))
    assert LEAST_S <= found[0] - beats[0][-1] <= limit + 2 * LOOK_S


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_that_gets_busy_masks_nobody(seed):
    """An hour of rounds. Pauses between beats grow, each to less than the limit that the ones before it have led to.
    Then beats come 0.4 to 1.4 s late, mostly later than the limit of a rank that was never late before, and the
    observer itself is held up for seconds."""
    rng = random.Random(seed)
    silence, now = Silence(), 0.0
    for turn in range(400):
        length = rng.expovariate(1 / 3)
        shortest, longest = [(0.02, 0.04), (0.06, 0.1), (0.15, 0.2)][turn // 5] if turn < 15 else (0.4, 1.4)
        beats, t = [], now
        while t < now + length + 1.5:
            t += 0.01 if rng.random() < 0.9 else rng.uniform(shortest, longest)
            beats.append(t)
        looks, at = [], now
        while at < now + length + 1.5:
            looks.append(at)
            at += LOOK if rng.random() < 0.98 else rng.uniform(LOOK, 5.0)
        looks.append(at)
        assert run(silence, [beats], [now + length], looks) == {}
        now += length + rng.uniform(0.0, 12.0)


def test_a_rank_that_was_never_late_may_not_be_as_late():
    """The same lateness masks a rank whose pauses have not grown."""
    steady, late = every(0.01, 3), every(0.01, 9, since=4.3)
    assert set(run(Silence(), [steady + late], [8.0], every(LOOK, 9))) == {0}
    silence = Silence()
    assert run(silence, [every(0.2, 3) + late], [8.0], every(LOOK, 9)) == {}


def test_a_stopped_observer_takes_its_own_pause_for_nobodys():
    """Both were stopped together: the rank has not beaten either."""
    assert run(Silence(), [[0.0, *every(0.01, 70, 60)]], [69.0], [0.0, LOOK, *every(LOOK, 70, 60.0)]) == {}


def test_a_rank_that_beats_and_never_answers_is_given_up():
    found = run(Silence(), [every(0.01, 60)], [99.0], every(LOOK, 60))
    assert ANSWER_S <= found[0] <= ANSWER_S + 2 * LOOK_S


def test_long_rounds_are_waited_for_longer():
    silence = Silence()
    assert run(silence, [every(0.01, 9)], [8.0], every(LOOK, 9)) == {}
    assert run(silence, [every(0.01, 120)], [110.0], every(LOOK, 120)) == {}
    assert silence.answer_limit_s == pytest.approx(160, rel=0.1)


def answers_after(silence: Silence, seconds: float, work: int) -> dict[int, float]:
    """A round of a rank that beats all the time."""
    until = min(seconds, 300) + 1
    return run(silence, [every(0.01, until)], [seconds], every(LOOK, until), work)


def test_a_rank_that_hangs_is_given_up_soon_after_short_rounds():
    silence = Silence()
    assert answers_after(silence, 9.0, work=8) == {}  # the first: nothing is known yet
    silence = Silence()
    for _ in range(5):
        assert answers_after(silence, 0.03, work=8) == {}
    found = answers_after(silence, 999.0, work=9)
    assert LEAST_ANSWER_S <= found[0] <= LEAST_ANSWER_S + 2 * LOOK_S
    assert answers_after(silence, 999.0, work=8)[0] == found[0]  # that round was no measure


def test_a_round_in_which_a_rank_died_is_no_measure():
    """It was given up by its process' end, which the rule did not see."""
    silence = Silence()
    assert answers_after(silence, 0.1, work=8) == {}
    silence.begin(0.0, {0: 0}, 8)
    for beats, now in enumerate(every(LOOK, 1.4)):
        assert silence.look(now, {0: beats}) == []
    silence.end(whole=False)
    silence.begin(2.0, {0: 100}, 8)
    assert silence.answer_limit_s == pytest.approx(20 * 0.1, rel=0.3)


def test_a_round_of_more_work_may_take_longer_in_proportion():
    silence = Silence()
    assert answers_after(silence, 0.1, work=8) == {}
    assert answers_after(silence, 60.0, work=8 * 64) == {}  # 20 x 64 x the other
    assert answers_after(silence, 200.0, work=8 * 64) == {}
    assert silence.answer_limit_s == pytest.approx(1200, rel=0.1)
    found = answers_after(silence, 999.0, work=8)  # and the short ones are still short
    assert found[0] <= 20 * (0.1 + LOOK_S) + 2 * LOOK_S


@pytest.mark.parametrize("seed", range(10))
def test_rounds_that_get_up_to_ten_times_as_long_mask_nobody(seed):
    """Prompts and single tokens in turn, on a machine that others use too."""
    rng, silence = random.Random(seed), Silence()
    for _ in range(150):
        work = rng.choice([8, 8, 8, 64, 8 * 512])
        assert answers_after(silence, (0.01 + 0.0005 * work) * rng.choice([1, 1, 2, 10]), work) == {}


def test_a_steady_rank_is_given_up_after_the_least_time():
    """The silence that is under way does not count as a pause."""
    found = run(Silence(), [every(0.01, 3)], [99.0], every(LOOK, 10))
    assert LEAST_S <= found[0] - 3 <= LEAST_S + 2 * LOOK_S


def test_the_limit_follows_the_longest_pause_and_forgets_it():
    silence = Silence()
    slow = every(0.12, 6)
    assert run(silence, [slow], [5.0], every(LOOK, 6)) == {}
    assert LEAST_S < silence.limit_s(0) <= MOST_S
    silence.forget([0])
    assert silence.limit_s(0) == LEAST_S


def test_work_for_others_does_not_count_and_a_hang_does():
    """A rank that works for another observer for a minute is not given up, and the next limit does not grow by it. One
    that says so no more is."""
    silence = Silence()
    run(silence, [every(0.01, 1)], [0.05], every(LOOK, 1), work=64)
    limit = silence.answer_limit_s
    silence.begin(10.0, {0: 0, 1: 0}, 64)
    beats, now = 0, 10.0
    while now < 70.0:
        now, beats = now + LOOK, beats + 1
        assert silence.look(now, {0: beats, 1: beats}, [0, 1]) == []
    late: list[int] = []
    while not late and now < 70.0 + 2 * LEAST_ANSWER_S:
        now, beats = now + LOOK, beats + 1
        late = silence.look(now, {0: beats, 1: beats}, [0])
    assert late == [1] and now - 70.0 <= LEAST_ANSWER_S + 2 * LOOK
    silence.end(whole=True)
    silence.begin(100.0, {0: 0}, 64)
    assert silence.answer_limit_s <= max(limit, LEAST_ANSWER_S)

"""What parking gains: the sentence follows from the numbers, and a case plays its load."""

from __future__ import annotations

import pytest

from lab.ablations.common.ablation import Estimated
from lab.ablations.fleet.sessions import (
    ALL,
    DRAM,
    LRU,
    MEAN,
    ORDER,
    PARKED,
    READ,
    SESSIONS_ABLATION,
    cases,
    label,
    reading,
)


def table(
    parked_s: dict[int, float], order_s: dict[int, float] | None = None, half: float = 0.001
) -> dict[str, dict[str, Estimated]]:
    """Least recently used, a request waits 1 s; parked, and parked without bringing blocks up, as said or 1 s."""
    values = {case.label: {name: Estimated(1.0, half) for name in SESSIONS_ABLATION.metrics} for case in cases(10)}
    for series, means in ((PARKED, parked_s), (ORDER, order_s or {})):
        for dram, seconds in means.items():
            values[label(series, dram)][MEAN] = Estimated(seconds, half)
    return values


def test_a_gain_is_told_and_a_loss_is_not_hidden():
    told = reading(table({DRAM[0]: 0.9, DRAM[1]: 1.2}))
    assert f"With {DRAM[1]} blocks it makes it worse" in told
    assert "nowhere shown" in reading(table({DRAM[0]: 0.9}))


def test_how_much_of_a_gain_is_the_order_in_which_blocks_leave_follows_from_the_numbers():
    few, some, many = DRAM
    parts = table({few: 0.8, some: 0.8, many: 1.2}, {few: 0.85, some: 0.95, many: 1.1})
    assert reading(parts).endswith(
        f"With {few} blocks more than half of the gain is the order in which blocks leave. "
        f"With {some} blocks less than half of the gain is the order in which blocks leave."
    )
    half = reading(table({few: 0.8}, {few: 0.9}))
    noise = reading(table({few: 0.8, some: 0.8}, {few: 0.85, some: 0.95}, half=0.5))
    for told in (half, noise, reading(table({many: 1.2}, {many: 1.1}))):
        assert told.endswith("It is not shown how much of a gain is the order in which blocks leave.")


def test_blocks_that_are_never_brought_up_still_leave_in_their_order():
    found = {
        series: next(case for case in cases(400) if case.label == label(series, DRAM[0])).simulate(0)
        for series in (LRU, ORDER, PARKED)
    }
    assert found[LRU]["blocks_raised"] == found[ORDER]["blocks_raised"] == 0 < found[PARKED]["blocks_raised"]
    assert len({run["ttft_s"]["mean"] for run in found.values()}) == 3


@pytest.mark.parametrize("name", [label(LRU, DRAM[0]), label(ORDER, DRAM[0]), label(PARKED, DRAM[0]), ALL])
def test_a_case_plays_its_load_and_has_every_metric(name):
    (case,) = [case for case in cases(200) if case.label == name]
    found = case.simulate(0)
    assert found["finished"] == found["requests"] == 200
    for metric in SESSIONS_ABLATION.metrics.values():
        assert metric(found) >= 0
    assert (SESSIONS_ABLATION.metrics[READ](found) > 0) == (name != ALL)

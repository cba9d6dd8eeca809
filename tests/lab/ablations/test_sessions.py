"""What parking gains: the sentence follows from the numbers, and a case plays its load."""

from __future__ import annotations

import pytest

from lab.ablations.common.ablation import Estimated
from lab.ablations.fleet.sessions import ALL, DRAM, MEAN, READ, SESSIONS_ABLATION, cases, label, reading


def table(mean_s: dict[int, float], half: float = 0.001) -> dict[str, dict[str, Estimated]]:
    """Least recently used, a request waits 1 s; parked, as said."""
    values = {case.label: {name: Estimated(1.0, half) for name in SESSIONS_ABLATION.metrics} for case in cases(10)}
    for dram, seconds in mean_s.items():
        values[label(True, dram)][MEAN] = Estimated(seconds, half)
    return values


def test_a_gain_is_told_and_a_loss_is_not_hidden():
    told = reading(table({DRAM[0]: 0.9, DRAM[1]: 1.2}))
    assert f"With {DRAM[1]} blocks it makes it worse" in told
    assert "nowhere shown" in reading(table({DRAM[0]: 0.9}))


@pytest.mark.parametrize("name", [label(False, DRAM[0]), label(True, DRAM[0]), ALL])
def test_a_case_plays_its_load_and_has_every_metric(name):
    (case,) = [case for case in cases(200) if case.label == name]
    found = case.simulate(0)
    assert found["finished"] == found["requests"] == 200
    for metric in SESSIONS_ABLATION.metrics.values():
        assert metric(found) >= 0
    assert (SESSIONS_ABLATION.metrics[READ](found) > 0) == (name != ALL)

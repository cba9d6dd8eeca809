"""scripts/bench.py estimates: its rows. The runs themselves need real nodes."""

from __future__ import annotations

import pytest

from lab.bench.estimates import GOAL_PERCENT, flags, rows_of, spinning


def timeline(estimated_s: float, measured_s: float, error: float | None) -> dict:
    missed = abs(estimated_s - measured_s)
    truth = {"estimated_s": estimated_s, "measured_s": measured_s, "error_s": missed, "error": error}
    return {"truth": {"ttft_s": truth}}


def test_rows_of_a_window():
    told = [timeline(0.1, 0.2, 0.5), timeline(0.3, 0.2, 0.5), timeline(0.0, 0.0005, None), {"truth": {}}]
    rows = {row.metric: row for row in rows_of("pair first window", told)}
    assert rows["ttft_s mean estimated"].ours == pytest.approx(400 / 3)
    assert rows["ttft_s mean measured"].ours == pytest.approx(400.5 / 3)
    assert rows["ttft_s mean difference"].ours == pytest.approx(200.5 / 3)
    mape = rows["ttft_s MAPE"]
    assert (mape.ours, mape.limits) == (pytest.approx(50.0), {"goal": GOAL_PERCENT})
    assert "2 of 3 requests have a share" in mape.note
    assert rows_of("nothing", []) == []


def test_a_quick_run_and_busy_cores_end():
    assert flags(["--quick"]).seconds == 10.0 and flags([]).seconds == 60.0
    with spinning(1):
        pass

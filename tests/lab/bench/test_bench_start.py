"""bench_start: how starts become rows. The starts themselves need real nodes."""

from __future__ import annotations

import pytest

from lab.bench.start import Start, flags, rows_of


def test_the_first_start_is_shown_apart() -> None:
    cold, warm = Start(9.0, 9.5, 0.3, 0.02), Start(2.0, 2.5, 0.2, 0.01)
    rows = {
        (row.case, row.metric): row for row in rows_of({1: [cold, warm], 2: [cold, warm, Start(4.0, 5.0, 0.4, 0.03)]})
    }
    assert rows["1 process", "first token of the first start"].ours == 9.5
    assert rows["1 process", "first token"].ours == 2.5
    assert rows["2 processes", "TPOT of one stream"].ours == pytest.approx(20.0)
    assert rows["2 processes", "TPOT of one stream"].peers == {"1 process": pytest.approx(10.0)}


def test_one_round_has_no_warm_start() -> None:
    with pytest.raises(SystemExit):
        flags(["--rounds", "1"])
    assert flags(["--quick"]).rounds == 2

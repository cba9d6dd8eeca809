"""What interference.py counts, without servers."""

from __future__ import annotations

import pytest

from lab.bench.common.client import Outcome
from lab.bench.common.results import marked
from lab.bench.interference import FULL, SETUPS, Round, flags, gaps_of, rows_of


def test_gaps_while_the_prompt_is_prefilled():
    """The stream's tokens come at 1, 2, 2.5, 4 and 6 s; the prompt is sent at 2.2 s and answered at 3.7 s."""
    stream = Outcome(sent_s=0.0, itl_s=[1.0, 1.0, 0.5, 1.5, 2.0])
    long = Outcome(sent_s=2.2, ttft_s=1.5)
    measured = gaps_of("dynamic", [stream, stream], long)
    assert measured.gaps == 4  # of each: the one begun before it was sent, the one that covers its end
    assert (measured.max_ms, measured.p50_ms, measured.alone_p50_ms) == (1500, 1000, 1000)
    assert (measured.ttft_ms, measured.tokens_per_s) == (1500, pytest.approx(2 / 1.5))


def test_one_table_with_ratios_against_the_first():
    rounds = [
        Round(name, 10, 50.0, 60.0, p99, p99 + 1, 3000.0, 20.0) for name, p99 in ((FULL, 800.0), ("mixed", 200.0))
    ]
    rounds.append(Round("mixed", 10, 50.0, 60.0, 400.0, 500.0, 3000.0, 20.0))
    rows = {(row.case, row.metric): row for row in rows_of(rounds, flags([]))}
    assert rows["mixed", "TBT p99"].ours == 300  # the median of its rounds
    assert rows["mixed", "TBT max"].ours == 500
    assert rows["mixed", "TBT p99"].peers == {FULL: 800.0}
    assert rows["mixed", "TBT p99"].samples == {"ours": 10, FULL: 10}  # so it is nearly the longest, and says so
    assert "p99 of fewer than 100 samples" in marked(rows["mixed", "TBT p99"]).note
    assert "dynamic" not in {case for case, _ in rows}


def test_setups_differ_in_what_they_show():
    assert len({(nodes, args) for nodes, args in SETUPS.values()}) == len(SETUPS)

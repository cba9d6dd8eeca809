"""scripts/tools.py capacity: the bisection, and a run on a small trace."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.formulas.bisect import Tried, largest
from lab.loads.trace import TraceRow, write_trace
from lab.planning import capacity


@given(edge=st.floats(0.01, 1000), begin=st.floats(0.01, 1000), tolerance=st.floats(0.01, 0.5))
def test_the_edge_is_found_within_the_tolerance(edge, begin, tolerance):
    tried = largest(lambda load: Tried(load, load <= edge, {}), begin, tolerance)
    best = max(one.load for one in tried if one.good)
    worst = min(one.load for one in tried if not one.good)
    assert best <= edge < worst <= best * (1 + tolerance)


@pytest.mark.parametrize(("good", "words"), [(True, "always met"), (False, "never met")])
def test_no_edge(good, words):
    with pytest.raises(ValueError, match=words):
        largest(lambda load: Tried(load, good, {}), 1.0, 0.1)


def test_a_tolerance_below_what_the_tries_can_show_names_the_flag():
    with pytest.raises(ValueError, match=r"--tolerance 1e-16 is too small: 40 tries"):
        largest(lambda load: Tried(load, load <= 3.3, {}), 1.0, 1e-16)


@pytest.mark.parametrize("times", [[], [5], [5, 5]])
def test_a_trace_without_a_rate_is_refused_in_one_line(times, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    write_trace(trace, [TraceRow(at, 600, 3, [0, 1]) for at in times])
    assert capacity.main(["--trace", str(trace), "--jitter-s", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("--requests" if times else "--trace") in said


def test_a_request_that_the_simulator_never_ends_is_not_within_the_objectives(monkeypatch):
    """It has no time to a first token, and times that are missing are in no percentile."""

    class Stuck:
        jobs, unfinished = (), 1

        def __init__(self, config: object) -> None:
            pass

        def played(self, rows: object) -> Stuck:
            return self

    monkeypatch.setattr(capacity, "Cluster", Stuck)
    args = capacity.parser().parse_args([])
    assert not capacity.try_speed(None, [], args, 1.0).good


def test_a_search_in_the_simulator(tmp_path, capsys):
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    write_trace(trace, [TraceRow(1000 * i, 8000, 30, [i * 16 + k for k in range(16)]) for i in range(40)])
    wanted = ["--trace", str(trace), "--prefill", "1", "--decode", "1", "--ttft-s", "3", "--tolerance", "0.2"]
    assert capacity.main([*wanted, "--json", str(out)]) == 0
    assert "requests/s" in capsys.readouterr().out
    row = orjson.loads(out.read_bytes())["rows"][0]
    assert row["values"]["ttft_s"] <= 3 and any(not one["good"] for one in row["tried"])
    with pytest.raises(SystemExit):
        capacity.main([*wanted, "--percentile", "100"])
    assert "--percentile" in capsys.readouterr().err

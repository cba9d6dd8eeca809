"""The simulator's benchmark at small sizes: what it writes, its goals, and that each size has a process of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lab.bench.sched import simulator
from lab.bench.sched.simulator import GOAL_S, REQUESTS_PER_NODE, Run, config, rows_of


def test_a_small_run_of_two_sizes(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert simulator.main(["--nodes", "96", "16", "--json", str(path)]) == 0
    told = json.loads(path.read_bytes())
    assert told["config"]["nodes"] == [96, 16] and told["commit"] and told["config"]["machine"]["cpu"]
    named = {(row["case"], row["metric"]): row for row in told["rows"]}
    for nodes in (96, 16):
        case = f"{nodes} nodes"
        values = {metric: row["ours"] for (name, metric), row in named.items() if name == case}
        assert values["requests"] == values["finished"] == REQUESTS_PER_NODE * nodes
        assert values["events"] > values["requests"] and 0 < values["goodput, share"] <= 1
        assert all(values[name] > 0 for name in ("time", "CPU time", "simulated time"))
        assert 0.01 < values["peak memory"] < 5
        assert named[case, "time"]["limits"] == {"goal": GOAL_S} == named[case, "CPU time"]["limits"]
    assert named["16 nodes", "peak memory"]["ours"] < named["96 nodes", "peak memory"]["ours"], "no process is reused"
    assert "96 nodes" in capsys.readouterr().out


def test_the_goal_grows_with_the_cores_that_it_allows():
    run = Run(300.0, 290.0, 4 << 30, 1000, 60.0, 200_000, 200_000, 0.5)
    rows = {row.metric: row for row in rows_of(10_000, run)}
    assert rows["time"].limits == {"goal": 900.0} and rows["CPU time"].limits == {"goal": 9000.0}
    assert rows["events per second"].ours == pytest.approx(1000 / 300)
    assert "10 cores" in rows["time"].note
    assert {row.metric: row.limits for row in rows_of(100, replace(run))}["CPU time"] == {"goal": 900.0}


def test_sizes_and_quick(capsys):
    assert (config(7, 0).prefill, config(7, 0).decode) == (3, 4)
    assert simulator.arguments(["--quick"]).nodes == [200]
    assert simulator.arguments(["--quick", "--nodes", "64", "5000", "9000"]).nodes == [64, 200]
    with pytest.raises(SystemExit):
        simulator.arguments(["--nodes", "1"])
    assert "a prefill node and a decode node" in capsys.readouterr().err

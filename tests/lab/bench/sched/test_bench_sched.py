"""The benchmark runs and writes what it measured."""

from __future__ import annotations

import json

import pytest

from lab.bench.sched import command as bench_sched


def test_a_small_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert bench_sched.main(["--quick", "--nodes", "16", "--json", str(path)]) == 0
    rows = json.loads(path.read_bytes())["rows"]
    named = {(row["case"], row["metric"]): row["ours"] for row in rows}
    for part in ("whole p50", "match p99", "choose p50"):
        assert named["decision, 16 nodes", part] > 0
    whole = next(row for row in rows if row["metric"] == "whole p50")
    assert {"mooncake-central-greedy", "dynamo-cost"} <= set(whole["peers"])
    assert whole["ours"] >= named["decision, 16 nodes", "choose p50"]  # all three parts, as the rivals'
    assert named["accept, 16 nodes, 2,000 tokens", "requests"] > 0
    assert named["keys of 12,000 tokens", "chain p50"] > 0
    assert "decision, 16 nodes" in capsys.readouterr().out


@pytest.mark.parametrize("nodes", ["16,many", "", "0", "-16", "2"])
def test_wrong_sizes_are_one_clear_line(nodes, capsys):
    with pytest.raises(SystemExit) as end:
        bench_sched.main(["--nodes", nodes])
    assert end.value.code == 2 and "--nodes: must be numbers of at least 16" in capsys.readouterr().err


def test_a_size_that_is_named_twice_is_measured_once():
    assert bench_sched.sizes_of("1024,16,16") == [16, 1024]

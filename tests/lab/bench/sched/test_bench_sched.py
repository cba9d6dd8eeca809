"""The benchmark runs and writes what it measured."""

from __future__ import annotations

import json

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

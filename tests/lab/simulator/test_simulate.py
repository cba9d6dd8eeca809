"""scripts/simulate.py: one run, its files, and words for what is wrong."""

from __future__ import annotations

import orjson
import pytest

from lab.loads.trace import TraceRow, write_trace
from lab.simulator import command as simulate


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRow(100 * i, 700, 5, [i // 2, 100 + i]) for i in range(30)])
    return path


def test_two_placements_side_by_side(trace, tmp_path, capsys):
    out, jobs = tmp_path / "out.json", tmp_path / "jobs.jsonl"
    arguments = ["--trace", str(trace), "--placement", "random,mooncake", "--prefill", "2", "--decode", "1"]
    assert simulate.main([*arguments, "--json", str(out), "--jobs", str(jobs)]) == 0
    assert "TTFT mean, s" in capsys.readouterr().out
    told = orjson.loads(out.read_bytes())
    assert {row["case"] for row in told["rows"] if row["metric"] == "ttft_s p50" and row["unit"] == "s"} == {
        "random",
        "mooncake",
    }
    assert told["config"]["prefill"] == 2 and told["config"]["trace"] == "t.jsonl"
    lines = (tmp_path / "jobs-mooncake.jsonl").read_bytes().splitlines()
    assert len(lines) == 30 and orjson.loads(lines[0])["finished"] > 0


def test_generated_requests_are_named(tmp_path):
    out = tmp_path / "out.json"
    assert simulate.main(["--generate", "agents", "--requests", "50", "--json", str(out)]) == 0
    told = orjson.loads(out.read_bytes())
    assert told["config"]["trace"] == "generated agents" and any(
        row["metric"] == "requests" and row["ours"] == 50 for row in told["rows"]
    )


WRONG = [
    (["--prefill", "0", "--decode", "0"], "--prefill"),
    (["--placement", "oracle"], "--placement"),
    (["--eviction", "oracle"], "eviction"),
    (["--queue-order", "oracle"], "--queue-order"),
    (["--batching-policy", "no.py:Mine"], "--batching-policy no.py:Mine: there is no file"),
    (["--trace", "no.jsonl"], "no.jsonl"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_flags_are_named(trace, arguments, words, capsys):
    assert simulate.main(["--trace", str(trace), *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_node_hours_and_their_cost(trace, tmp_path):
    out = tmp_path / "out.json"
    argv = ["--trace", str(trace), "--prefill", "2", "--decode", "1", "--prefill-cost", "3", "--json", str(out)]
    assert simulate.main(argv) == 0
    rows = {row["metric"]: row["ours"] for row in orjson.loads(out.read_bytes())["rows"]}
    hours = rows["seconds"] / 3600
    assert rows["node_hours"] == pytest.approx(3 * hours)
    tokens = rows["goodput"] * 30 * 705
    assert rows["cost_per_million_tokens"] == pytest.approx(1e6 * (2 * 3 + 1) * hours / tokens)

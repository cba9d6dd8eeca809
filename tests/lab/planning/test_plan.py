"""scripts/tools.py plan and scripts/tools.py check-plan: what they print, and words for what is wrong."""

from __future__ import annotations

import orjson
import pytest

from lab.formulas.loads import drawn, load_of
from lab.loads.trace import TraceRow, write_trace
from lab.planning import check as check_plan
from lab.planning import command as command


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trace(
        path, [TraceRow(500 * i, 5000, 80, [*range(5), *range(100 * i + 100, 100 * i + 105)]) for i in range(40)]
    )
    return path


def test_a_plan_of_a_trace(trace, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert command.main(["--trace", str(trace), "--pool-blocks", "100", "--ttft-s", "5", "--json", str(out)]) == 0
    assert "49.9% of the prompt tokens found" in " ".join(capsys.readouterr().out.split())
    told = orjson.loads(out.read_bytes())
    assert told["config"]["plan"]["best"]["prefill"] >= 1 and told["config"]["pool_blocks"] == 100


def test_a_plan_of_a_published_model(trace, tmp_path):
    out, pooled = tmp_path / "plan.json", ["--trace", str(trace), "--pool-blocks", "100", "--ttft-s", "5"]
    geometry = ["--model-geometry", "Qwen3-Next-80B", "--hardware", "8xh200", "--state-every", "4"]
    assert command.main([*pooled, *geometry, "--json", str(out)]) == 0
    told = orjson.loads(out.read_bytes())["config"]
    assert told["model_geometry"] == "Qwen3-Next-80B" and told["plan"]["best"]["decode"] >= 1


WRONG = [
    (["--model-geometry", "Kimi-K9"], "--model-geometry", 2),
    (["--hit-rate", "1"], "--hit-rate", 2),
    (["--prompt", "1000,1"], "--rate", 2),
    (["--ttft-s", "0.01"], "infeasible by service time", 1),
    (["--prompt", "1000,1", "--rate", "1"], "--trace", 2),
    (["--hit-rate", "0.5", "--pool-blocks", "9"], "--pool-blocks", 2),
    (["--trace", "missing.jsonl"], "--trace", 2),
]


@pytest.mark.parametrize(("arguments", "words", "code"), WRONG)
def test_wrong_flags_are_named(trace, arguments, words, code, capsys):
    assert command.main(["--trace", str(trace), *arguments]) == code
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert code != 2 or said.err.count("\n") == 1, "a refusal is one line"


def test_a_pool_sees_the_requests_in_the_order_of_their_arrival(tmp_path):
    """A file need not be sorted: what comes first fills the pool."""
    rows, path, hits = [TraceRow(1000 * i, 600 * (i + 1), 80, [*range(12)]) for i in range(6)], tmp_path / "t.jsonl", []
    for order in (rows, rows[::-1]):
        write_trace(path, order)
        args = command.parser().parse_args(["--trace", str(path), "--pool-blocks", "100"])
        hits.append(command.load(args)[1].found.tolist())
    assert hits[0] == hits[1] and hits[0][0] == 0.0


def test_hits_of_a_pool_too_small_are_fewer():
    rows = drawn(1, 300, (8000, 0.5), (100, 0.5), 5.0, shared=0.8)
    small, large = (load_of(rows, 0.0, blocks).hit_rate for blocks in (100, 100_000))
    assert 0 <= small < large < 0.5
    assert load_of(rows, 0.0).rate == pytest.approx(5.0, rel=0.2)


def test_a_case_is_drawn_planned_and_simulated():
    first, again = (check_plan.check(1, 120) for _ in range(2))
    assert first == again and first.simulated is not None


def test_what_counts_as_good():
    base = check_plan.Checked("m", 1.0, 1.0, 1.0, 0.0, (10, 4), (9, 4))
    assert base.good
    off = check_plan.Checked("m", 1.0, 1.0, 1.0, 0.0, (12, 4), (9, 4))
    assert not off.good
    assert not check_plan.Checked("m", 1.0, 1.0, 1.0, 0.0, None, (1, 1)).good
    assert check_plan.Checked("m", 1.0, 1.0, 1.0, 0.0, None, None).good

"""Ablations: every one runs, says something, and draws; labels of the paper's values exist."""

from __future__ import annotations

import math

import orjson
import pytest

from scripts import ablate, reproduce
from scripts.lab import curve
from scripts.lab.ablation import estimated, run
from scripts.lab.ablations import ABLATIONS, WITH_GOALS
from scripts.lab.runs import Runs
from scripts.lab.tables import section


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_runs_and_reads_its_numbers(name):
    ablation = ABLATIONS[name]
    done = []
    outcome = run(ablation, 2 if name in ("regret", "gossip") else 16, 1, 1, lambda: done.append(1))
    assert len(done) == len(outcome.cases)
    assert set(ablation.paper) <= {case.label for case in outcome.cases}
    text = section(outcome)
    assert ablation.question in text and ablation.reading(outcome.values) in text
    assert ("| goal | wanted | ours |" in text) == (name in WITH_GOALS)
    assert all(
        result["finished"] + result["refused"] == result["requests"] for r in outcome.raw.values() for result in r
    )


def test_an_interval_over_seeds():
    assert math.isnan(estimated([3.0]).half)
    three = estimated([1.0, 2.0, 3.0])
    assert three.mean == 2.0 and three.half == pytest.approx(4.30 * 1.0 / math.sqrt(3))
    assert str(three) == "2 ±2.5"
    assert str(estimated([math.inf, 20.0])) == "inf", "one seed never recovered"
    assert str(estimated([math.nan, 1.0])) == ""


def test_the_command_writes_figures_and_a_plot(tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    wanted = ["--requests", "30", "--seeds", "2", "--workers", "1", "--json", str(out), "--plot", str(plot)]
    assert ablate.main(["overlap", *wanted]) == 0
    assert "layer-wise" in capsys.readouterr().out
    told = orjson.loads(out.read_bytes())
    assert [len(row["seeds"]) for row in told["rows"]] == [2, 2]
    assert told["rows"][0]["config"]["kv_overlap"] == "layer"
    assert plot.read_text().startswith("<?xml")


def test_the_list_and_unknown_names(capsys):
    assert ablate.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ABLATIONS)
    with pytest.raises(SystemExit):
        reproduce.main(["--only", "nonsense"])
    assert "no ablation called nonsense" in capsys.readouterr().err


def test_a_report(tmp_path):
    assert reproduce.main(["--quick", "--only", "overlap", "--workers", "1", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "![overlap](overlap.svg)" in report and (tmp_path / "overlap.svg").exists()
    means = orjson.loads((tmp_path / "report.json").read_bytes())
    assert means["config"]["defaults"]["prefill"] == 8 and means["commit"]
    assert [row["case"] for row in means["rows"]] == ["layer-wise", "at the end"]
    assert means["rows"][1]["config"]["kv_overlap"] == "none" and "kv_overlap" not in means["rows"][0]["config"]


def test_a_run_that_was_stopped_goes_on(tmp_path):
    ablation, file = ABLATIONS["overlap"], tmp_path / "runs.jsonl"
    whole = run(ablation, 12, 2, 1, lambda: None, Runs(file, "abc", 12))
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    file.write_text("".join(lines[:3]) + lines[3][:40])  # stopped in the middle of the last one
    kept = Runs(file, "abc", 12)
    assert kept.get("overlap", "at the end", 0) is not None and kept.get("overlap", "at the end", 1) is None
    again = run(ablation, 12, 2, 1, lambda: None, kept)
    assert section(again) == section(whole) and orjson.dumps(again.raw) == orjson.dumps(whole.raw)
    assert Runs(file, "another commit", 12).get("overlap", "layer-wise", 0) is None


def test_hit_rates_by_size_are_held_against_another_program():
    known = {"synthetic": ("synthetic_trace.jsonl", [0.145, 0.233, 0.315, 0.428, 0.577, 0.651], 0.651)}
    known["conversation"] = ("generated: conversation", [0.0] * 6, 0.0)
    assert curve.disagreements(known) == []
    known["synthetic"][1][2] = 0.33
    assert curve.disagreements(known) == ["synthetic, 3M tokens: 0.330, another program says 0.315"]

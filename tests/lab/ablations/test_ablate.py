"""Ablations: every one runs, says something, and draws; labels of the paper's values exist."""

from __future__ import annotations

import lzma
import math
from statistics import stdev

import orjson
import pytest

from lab.ablations import command as ablate
from lab.ablations import curve, reproduce
from lab.ablations.common.ablation import estimated, run, run_each
from lab.ablations.common.runs import Runs
from lab.ablations.common.tables import section
from lab.ablations.decoding.case import TOKENS
from lab.ablations.decoding.flexgen import OUTPUT
from lab.ablations.simulated import ABLATIONS, WITH_GOALS, scheduling
from lab.caches import command as cache_policies

LONG = {"rivals", "cache-by-model", "long-prompts"}
"""Ablations that take most of the time, although each case has few requests: only among the heavy tests."""

MANY_CASES = 18
"""From this number of cases, an ablation is tried with fewer requests in each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if name in LONG else []) for name in ABLATIONS]
)
def test_every_ablation_runs_and_reads_its_numbers(name):
    ablation = ABLATIONS[name]
    done = []
    requests = 2 if name in ("regret", "gossip") else 4 if len(ablation.cases(None)) >= MANY_CASES else 16
    outcome = run(ablation, requests, 1, 1, lambda: done.append(1))
    assert len(done) == len(outcome.cases)
    assert set(ablation.paper) <= {case.label for case in outcome.cases}
    text = section(outcome)
    assert ablation.question in text and ablation.reading(outcome.values) in text
    assert ("| goal | wanted | ours |" in text) == (name in WITH_GOALS)
    assert all(
        result["finished"] + result["refused"] == result["requests"] for r in outcome.raw.values() for result in r
    )


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_says_what_it_costs(name):
    metrics = ABLATIONS[name].metrics
    assert any(metric.startswith("cost per million") for metric in metrics)
    assert any(metric.startswith("node-hours") for metric in metrics)


@pytest.mark.parametrize(
    ("name", "hours"),
    [
        ("flexgen", lambda found: found["finished"] * OUTPUT / found["tokens_s"] / 3600),
        ("beyond-memory", lambda found: TOKENS / found["tokens_s"] / 3600),
    ],
)
def test_node_hours_are_the_seconds_of_what_was_answered(name, hours):
    for case in ABLATIONS[name].cases(4)[:3]:
        found = case.simulate(0)
        assert found["node_hours"] == pytest.approx(hours(found)) and found["node_hours"] > 0


def test_an_interval_over_seeds():
    assert math.isnan(estimated([3.0]).half)
    three = estimated([1.0, 2.0, 3.0])
    assert three.mean == 2.0 and three.half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert str(three) == "2 ±2.5"
    assert str(estimated([math.inf, 20.0])) == "inf", "one seed never recovered"
    assert str(estimated([math.nan, 1.0])) == ""


@pytest.mark.parametrize("seeds", [2, 11, 31, 35, 500])
def test_an_interval_has_the_width_of_student_t_for_its_number_of_seeds(seeds):
    """The probability within it: the density's integral, by x = sqrt(freedom) tan(u)."""
    values = [0.0, 2.0] + [1.0] * (seeds - 2)
    t, freedom = estimated(values).half / (stdev(values) / math.sqrt(seeds)), seeds - 1
    steps, end = 2000, math.atan(t / math.sqrt(freedom))
    total = sum(math.cos(end * (step + 0.5) / steps) ** (freedom - 1) for step in range(steps)) * end / steps
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    exact = freedom in (*range(1, 31), 40, 60, 120)
    assert 0.9499 < 2 * scale * total < (0.9501 if exact else 0.952)


def test_the_command_writes_figures_and_a_plot(tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    wanted = ["--requests", "30", "--seeds", "2", "--workers", "1", "--json", str(out), "--plot", str(plot)]
    assert ablate.main(["overlap", *wanted]) == 0
    assert "layer-wise" in capsys.readouterr().out
    told = orjson.loads(out.read_bytes())
    assert [len(case["seeds"]) for case in told["config"]["cases"].values()] == [2, 2]
    assert told["config"]["cases"]["layer-wise"]["config"]["kv_overlap"] == "layer"
    assert all(row["metric"] and row["ours"] is not None for row in told["rows"])
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
    assert "one seed per case; 2 runs in" in report and "400 per case" in report
    assert "Configuration: pool_blocks 6000; nic_gbit_s 100;" in report and "kv_overlap layer or none." in report
    means = orjson.loads((tmp_path / "report.json").read_bytes())
    assert means["config"]["defaults"]["prefill"] == 8 and means["commit"]
    assert means["config"]["minutes"] > 0 < means["config"]["processor_minutes"] and means["config"]["runs"] == 2
    runs = [orjson.loads(line) for line in lzma.decompress((tmp_path / "runs.jsonl.xz").read_bytes()).splitlines()]
    assert len(runs) == 2 and {run["commit"] for run in runs} == {means["commit"]}
    assert {(row["ablation"], row["case"]) for row in means["rows"]} == {
        ("overlap", "layer-wise"),
        ("overlap", "at the end"),
    }
    cases = means["config"]["cases"]["overlap"]
    assert cases["at the end"]["config"]["kv_overlap"] == "none" and "kv_overlap" not in cases["layer-wise"]["config"]


def test_a_report_has_what_papers_and_goals_need_and_the_rest_on_demand(monkeypatch, tmp_path):
    assert set(WITH_GOALS) <= set(reproduce.CORE) < set(ABLATIONS)
    assert {"effective", "breakdown", "scheduling", "pool", "ratio", "overload"} <= set(reproduce.CORE)
    chosen = []
    monkeypatch.setattr(reproduce, "commit", lambda: "abc")
    monkeypatch.setattr(reproduce, "replays", lambda: ([], []))
    monkeypatch.setattr(reproduce, "write", lambda names, *_: chosen.append(list(names)) or reproduce.Report())
    for argv in ([], ["--all"], ["--only", "pool,ratio"]):
        assert reproduce.main([*argv, "--out", str(tmp_path)]) == 0
    assert chosen == [reproduce.CORE, list(ABLATIONS), ["pool", "ratio"]]
    with pytest.raises(SystemExit):
        reproduce.main(["--all", "--only", "pool"])


def test_the_report_holds_cache_policies_against_a_reference_only_where_it_has_one(monkeypatch):
    lru = cache_policies.Row("synthetic | lru | 1000", "block hit rate", "share", 0.0861, {}, {"reference": 0.084})
    fifo = cache_policies.Row("synthetic | fifo | 1000", "block hit rate", "share", 0.094, {}, {"reference": 0.084})
    own = cache_policies.Row("generated | lru | 1000", "block hit rate", "share", 0.5)
    for rows, goals, said in (
        ([lru], [True], "at most 0.0021 from"),
        ([lru, fifo], [False], "0.0940, the reference says 0.084"),
        ([own], [], "No reference"),
    ):
        monkeypatch.setattr(cache_policies, "load", lambda args: {})
        monkeypatch.setattr(cache_policies, "measured", lambda *_, rows=rows: rows)
        text, answered = reproduce.policies()
        assert said in text and [goal.met for goal in answered] == goals


def test_the_papers_order_of_schedulers_is_a_goal():
    def means(*values):
        return {name: {"mean TTFT, s": estimated([mean])} for name, mean in zip(scheduling.PAPER, values, strict=True)}

    assert [goal.met for goal in scheduling.goals(means(9.0, 4.0, 2.0, 1.0))] == [True]
    assert [goal.met for goal in scheduling.goals(means(9.0, 4.0, 1.0, 2.0))] == [False]


def test_a_run_that_was_stopped_goes_on(tmp_path):
    ablation, file = ABLATIONS["overlap"], tmp_path / "runs.jsonl"
    whole = run(ablation, 12, 2, 1, lambda: None, Runs(file, "abc", 12))
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    file.write_text("".join(lines[:3]) + lines[3][:40])  # stopped in the middle of the last one
    kept = Runs(file, "abc", 12)
    assert kept.get("overlap", "at the end", 0) is not None and kept.get("overlap", "at the end", 1) is None
    again = run(ablation, 12, 2, 1, lambda: None, kept)
    assert kept.made == 1 and kept.taken == 4, "three of them were there; this test asked for one more"
    assert section(again) == section(whole) and orjson.dumps(again.raw) == orjson.dumps(whole.raw)
    assert Runs(file, "another commit", 12).get("overlap", "layer-wise", 0) is None
    assert Runs(file, "abc", 13).get("overlap", "layer-wise", 0) is None
    kept.pack(tmp_path / "runs.jsonl.xz")
    assert lzma.decompress((tmp_path / "runs.jsonl.xz").read_bytes()) == file.read_bytes()


def test_ablations_that_share_processes_have_the_results_of_one_after_the_other():
    names = ["overlap", "quantization"]
    done: list[str] = []
    shared = list(run_each([ABLATIONS[name] for name in names], 12, 2, 2, done.append))
    assert done == ["overlap"] * 4 + ["quantization"] * 4
    for name, outcome in zip(names, shared, strict=True):
        alone = run(ABLATIONS[name], 12, 2, 1, lambda: None)
        assert section(outcome) == section(alone) and orjson.dumps(outcome.raw) == orjson.dumps(alone.raw)


@pytest.mark.parametrize(("came", "said"), [("abc-dirty", "git status"), ("unknown", "git checkout")])
def test_a_report_is_of_one_commit(came, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(reproduce, "commit", lambda: came)
    with pytest.raises(SystemExit):
        reproduce.main(["--out", str(tmp_path / "report")])
    assert said in capsys.readouterr().err and not (tmp_path / "report").exists()


def test_a_checkout_that_changes_under_a_run_makes_it_fail(monkeypatch, tmp_path, capsys):
    commits = iter(["abc", "abc-dirty"])
    monkeypatch.setattr(reproduce, "commit", lambda: next(commits))
    wanted = ["--requests", "4", "--seeds", "1", "--workers", "1", "--only", "overlap", "--out", str(tmp_path)]
    assert reproduce.main(wanted) == 1
    assert "measure it again" in " ".join(capsys.readouterr().err.split())


def test_hit_rates_by_size_are_held_against_another_program():
    known = {"synthetic": ("synthetic_trace.jsonl", [0.145, 0.233, 0.315, 0.428, 0.577, 0.651], 0.651)}
    known["conversation"] = ("generated: conversation", [0.0] * 6, 0.0)
    assert curve.disagreements(known) == []
    known["synthetic"][1][2] = 0.33
    assert curve.disagreements(known) == ["synthetic, 3M tokens: 0.330, another program says 0.315"]

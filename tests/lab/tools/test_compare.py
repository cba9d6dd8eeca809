"""Comparing two checkouts: figures are matched by name, a failing command is named, and both sides really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.tools import compare

BENCHMARK = """
import json, sys
rows = [{"case": "a", "metric": name, "unit": "us", "ours": ours} for name, ours in (("time", VALUE), ("gone", None))]
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({"commit": "c0ffee", "rows": rows}))
"""


def figure(value: float) -> compare.Figures:
    return compare.figures({"rows": [{"case": "a", "metric": "time", "unit": "us", "ours": value}]})


def test_medians_stand_next_to_each_other_with_the_spread_of_ours():
    (row,) = compare.compared([figure(4.0), figure(2.0), figure(3.0)], [figure(6.0), figure(9.0), figure(6.0)])
    assert (row.case, row.metric, row.unit, row.ours, row.peers) == ("a", "time", "us", 3.0, {"other": 6.0})
    assert row.note == "spread 2.00"


def test_a_figure_that_one_round_lacks_is_left_out():
    assert compare.compared([figure(4.0), {}], [figure(6.0), figure(6.0)]) == []


def test_both_checkouts_run_and_the_result_names_the_other_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder, name, value in ((ours, "bench.py", "5"), (other, "old_bench.py", "10")):
        folder.mkdir()
        (folder / name).write_text(BENCHMARK.replace("VALUE", value))
    monkeypatch.setattr(compare, "HERE", ours)
    path = tmp_path / "out.json"
    words = ["bench.py --quick", "--other", str(other), "--other-command", "old_bench.py", "--json", str(path)]
    assert compare.main([*words, "--rounds", "2"]) == 0
    found = json.loads(path.read_text())
    assert [(row["ours"], row["peers"]) for row in found["rows"]] == [(5.0, {"other": 10.0})]
    assert found["config"]["other_commits"] == ["c0ffee"]


def test_a_command_that_fails_is_named_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bench.py").write_text(BENCHMARK.replace("VALUE", "5") + "sys.exit(3)\n")
    monkeypatch.setattr(compare, "HERE", tmp_path)
    path = tmp_path / "out.json"
    assert compare.main(["no_such_file.py", "bench.py", "--other", str(tmp_path), "--json", str(path)]) == 1
    told = capsys.readouterr().err
    assert "'no_such_file.py' wrote no result" in told and "exit code 3" in told
    assert [row["ours"] for row in json.loads(path.read_text())["rows"]] == [5.0]


def test_nothing_to_compare_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder, case in ((ours, "a"), (other, "b")):
        folder.mkdir()
        (folder / "bench.py").write_text(BENCHMARK.replace("VALUE", "5").replace('"case": "a"', f'"case": "{case}"'))
    monkeypatch.setattr(compare, "HERE", ours)
    assert compare.main(["bench.py", "--other", str(other), "--rounds", "1"]) == 1
    assert "no figure in common" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--other-command", "a", "--other-command", "b"]])
def test_flags_that_cannot_work_are_refused(tmp_path: Path, words: list[str]):
    with pytest.raises(SystemExit):
        compare.flags(["a", "--other", str(tmp_path), *words])

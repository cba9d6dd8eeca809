"""The tables of README.md and docs/performance.md come from result files, one run of one commit each, and no figure
stands in the text around them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lab.bench.common import machine as here
from lab.docs.command import tables
from lab.docs.figure_list import FIGURES
from lab.docs.figures import MARK, RESULTS, Figure, Result, caption, filled, number
from lab.docs.summary import BLOCKS, SUMMARY

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "docs/performance.md")
MEASURED = re.compile(
    r"\d[\d.,]* (?:ms|us|s|MB/s|GB/s|GFLOP/s|TFLOP/s|tokens/s|requests/s|%)(?![\w/-])|\d\.\d+x|\d(?:\.\d+)?e-\d+"
)
"""A number with a unit of time, rate or share, a ratio, or a small number as programs print it."""

SETTINGS = {
    "docs/failures.md": {"50 ms", "0.5 s", "1.5 s", "30 s", "10 s", "3 s", "1 s", "45 s", "15 s", "300 s"},
    "docs/store.md": {"1 s", "60 s", "3 s", "30 s", "10 s"},
    "docs/testing.md": set(),
    "docs/threats.md": {"5 ms", "5 s"},
    "docs/operations.md": {"4.5 %", "70 %", "80 %", "95 %"},
    "docs/api.md": {"5 s", "10 s"},
    "docs/request.md": set(),
    "docs/hacking.md": set(),
    "docs/comparison.md": {"780 GB/s"},
}
"""Pages without tables of results -> the deadlines, periods and flags that they state, or figures that others have
published. A measured figure stands in docs/performance.md, next to its file."""

SAID = {
    "20 to 30 %": "the drift of virtual machines, a reason to read ratios",
    "goal is 2 ms": "a goal",
    "4 requests/s of 512": "a load",
    "for 8 s": "how long a cut lasts",
    "for 16 s, three times": "how long and how often a node is stopped",
    "with 1 % loss": "what the virtual network loses",
    "at most 3 % more than alone": "a goal",
    "published comparison on CPUs, 27 to 31 %": "a figure of others",
    "grows by at most 10 %": "a goal",
    "need 160 s": "of the report that the sentence names",
}
"""Numbers of prose that are no result of the page: settings, goals, or of a file that the sentence names."""


def written(folder: Path, name: str, **more: object) -> Path:
    rows = [
        {
            "case": "a",
            "metric": "t",
            "unit": "us",
            "ours": 5.0,
            "peers": {"p": 10.0, "gone": None},
            "limits": {"l": 4.0},
        },
        {"case": "b", "metric": "t", "unit": "us", "ours": 1234.5, "peers": {}, "limits": {}},
    ]
    machine = {"cpu": "A CPU", "cpu_features": ["avx2"], "cores": 2, "load_before": 0.1, "quiet": True}
    data = {"config": {"machine": machine | more}, "commit": "0123456789", "rows": rows}
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def test_a_table_is_made_from_the_newest_file_alone(tmp_path):
    written(tmp_path, "2026-01-01-x.json", cpu="An older CPU")
    written(tmp_path, "2026-02-01-x.json")
    written(tmp_path, "2026-03-01-x-limited.json", cpu="Another result")
    figure = Figure("f", {"t": "time"}, "x", "scripts/x.py", compared_with=("p", "gone", "l"))
    lines = figure.render(tmp_path).splitlines()
    assert lines[2] == "| a: time, us | 5 | 10 | 0.50 | missing |  | 4 | 1.25 |"
    assert lines[3] == "| b: time, us | 1,234 |  |  |  |  |  |  |"
    assert "2026-02-01-x.json" in lines[-1] and "A CPU (avx2)" in lines[-1] and "`0123456`" in lines[-1]
    assert "busy" not in lines[-1]


def test_uncommitted_changes_are_marked(tmp_path):
    path = written(tmp_path, "2026-01-01-x.json")
    path.write_text(path.read_text().replace("0123456789", "0123456789-dirty"))
    assert "with uncommitted changes" in caption(Result.newest("x", tmp_path), "scripts/x.py")


def test_a_busy_machine_is_marked(tmp_path):
    written(tmp_path, "2026-01-01-x.json", load_before=2.0, quiet=False)
    assert "**machine busy**" in caption(Result.newest("x", tmp_path), "scripts/x.py")


def test_what_others_used_is_under_the_table(tmp_path):
    written(tmp_path, "2026-01-01-x.json", others_share=0.31, quiet=False)
    said = caption(Result.newest("x", tmp_path), "scripts/x.py")
    assert "load before 0.10, others 31% of the cores (**machine busy**)" in said


def test_a_busy_machine_is_marked_under_tables_of_counts_and_pauses_too(tmp_path):
    written(tmp_path, "2026-01-01-x.json", load_before=2.0, quiet=False)
    assert "**machine busy**" in caption(Result.newest("x", tmp_path), "scripts/x.py", timed=False)
    written(tmp_path, "2026-02-01-x.json")
    assert "busy" not in caption(Result.newest("x", tmp_path), "scripts/x.py", timed=False)


def test_a_column_may_show_the_goal_of_a_metric(tmp_path):
    written(tmp_path, "2026-01-01-x.json")
    figure = Figure("f", {"t": "time", "t -> l": "goal", "gone": "gone"}, "x", "scripts/x.py", cases="a")
    assert figure.render(tmp_path).splitlines()[2] == "| a | 5 | 4 |  |"


def test_a_row_without_a_value_says_what_that_means(tmp_path):
    path = written(tmp_path, "2026-01-01-x.json")
    path.write_text(path.read_text().replace("5.0", "null"))
    assert Figure("f", {"t": "t"}, "x", "scripts/x.py").render(tmp_path).splitlines()[2] == "| a | missing |"
    figure = Figure("f", {"t": "t"}, "x", "scripts/x.py", without="none")
    assert figure.render(tmp_path).splitlines()[2] == "| a | none |"


def test_rows_that_the_newest_result_does_not_have_are_no_empty_table(tmp_path):
    written(tmp_path, "2026-01-01-x.json")
    figure = Figure("f", {"t": "time"}, "x", "scripts/x.py", cases="other .*")
    assert figure.render(tmp_path) == "The newest result of `scripts/x.py` does not have these rows."
    other = Figure("f", {"share": "share"}, "x", "scripts/x.py")
    assert other.render(tmp_path) == "The newest result of `scripts/x.py` does not have these rows."


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_what_is_published_is_of_a_quiet_machine_or_says_that_it_was_busy(figure):
    result = Result.newest(figure.result or figure.name)
    if "quiet" not in result.machine:
        assert not figure.timed, "a time without the load of its machine"
    elif not result.machine["quiet"] and "does not have these rows" not in (text := figure.render()):
        assert "**machine busy**" in text


@pytest.mark.parametrize(
    "figure", [one for one in FIGURES if one.command.startswith("scripts/faults.py")], ids=lambda figure: figure.name
)
def test_the_command_under_a_table_of_faults_is_the_one_of_its_run(figure):
    config = Result.newest(figure.result or figure.name).config
    said = dict(re.findall(r"--([a-z-]+) ([^\s-]\S*)", figure.command))
    known = {flag: str(config[name]) for flag in said if (name := flag.replace("-", "_")) in config}
    assert known == {flag: said[flag] for flag in known}


@pytest.mark.parametrize(
    "paths",
    [
        ["--peer-python", "python", "--peer-python", "nixl=python", "--json", "x.json"],
        ["--peer-python=python", "--peer-python=nixl=python", "--json=x.json"],
    ],
)
def test_the_command_under_a_table_has_the_flags_of_its_run(tmp_path, paths):
    argv = ["--only", "a,b", *paths, "--quick"]
    path = written(tmp_path, "2026-01-01-x.json")
    data = json.loads(path.read_text())
    data["config"]["argv"] = argv
    path.write_text(json.dumps(data))
    assert (
        "`scripts/bench.py x --only a,b --peer-python VENV/bin/python --peer-python nixl=VENV/bin/python --quick`"
        in Figure("x", {"t": "t"}).render(tmp_path)
    )


@pytest.mark.parametrize("name", ["transfer", "store"])
def test_every_cell_with_a_goal_is_in_a_table(name):
    """A table that left out sizes could leave out the missed ones."""
    result = Result.newest(name)
    shown = {case for one in FIGURES if (one.result or one.name) == name for case in result.cases(one.cases)}
    assert shown == set(result.cases(r"(read|write|get|put) .*"))
    labels = {case.split(",")[0].replace("get", "read").replace("put", "write") for case in shown}
    assert {goal["what"].split(":")[0] for goal in result.config["goals"]} <= labels


def test_only_what_is_between_the_marks_changes():
    page = "before\n<!-- figure: f -->\nold\n<!-- end -->\nafter\n"
    assert filled(page, {"f": lambda: "new"}) == page.replace("old", "new")
    with pytest.raises(KeyError):
        filled(page, {})


def test_numbers_have_three_digits():
    assert [number(value) for value in (None, 0.0, 0.1234, 12.345, 1234.5, 48000.0)] == [
        "missing", "0", "0.123", "12.3", "1,234", "48,000",
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_every_mark_names_a_figure_and_every_table_is_marked(page):
    text = (ROOT / page).read_text()
    named = [found[2] for found in MARK.finditer(text)]
    assert named and set(named) <= set(tables()) and len(named) == len(set(named))
    if page == "docs/performance.md":
        assert "|---" not in MARK.sub("", text), "a table that no result file makes"
        assert set(named) == {figure.name for figure in FIGURES}


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_stands_in_the_prose(page):
    """What was measured stands in a table; a number of the prose is a setting or a goal."""
    text = MARK.sub("", (ROOT / page).read_text())
    if page == "README.md":
        text = text.partition("## Measured")[2].partition("\n## ")[0]
    for said in SAID:
        text = text.replace(said, "")
    assert [text[max(0, found.start() - 40) : found.end()] for found in MEASURED.finditer(text)] == []


@pytest.mark.parametrize("page", SETTINGS)
def test_pages_of_promises_state_settings_and_nothing_measured(page):
    text = (ROOT / page).read_text()
    assert {found[0] for found in MEASURED.finditer(text)} == SETTINGS[page]


@pytest.mark.parametrize(
    ("ours", "line"), [("ours-shm", "KV between processes of one host"), ("ours-tcp", "KV over TCP")]
)
def test_the_front_page_says_how_many_threads_copied(ours, line):
    rows = [row for row in Result.newest("transfer").rows if re.match(BLOCKS, row["case"])]
    counts = sorted({row["threads"][ours] for row in rows if ours in row["threads"]})
    (said,) = [text for text in (ROOT / "README.md").read_text().splitlines() if text.startswith(f"| {line}")]
    assert f"ours kept {counts[0]} " in said and f" {counts[-1]} threads busy" in said


@pytest.mark.parametrize("name", sorted({line.result for line in SUMMARY}))
def test_what_the_front_page_shows_is_of_a_commit_and_a_known_cpu(name):
    result = Result.newest(name)
    assert re.fullmatch(r"[0-9a-f]{40}", result.commit), "measured on uncommitted changes"
    assert result.machine["cpu_features"]
    assert all(line.values(result) for line in SUMMARY if line.result == name)


def test_the_prose_of_the_measurements_is_short():
    """Its words without tables, their captions and code: the page is for its tables."""
    text = MARK.sub("", (ROOT / "docs/performance.md").read_text())
    words = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).split()
    assert 500 < len(words) < 3_500


WITHOUT_COMMIT = {"2026-11-21-embedded-cpu-model.json", "2026-11-21-first-answer.json"}
"""Older results that name no commit, or a short one. No new result may be one of them, and none has uncommitted
changes."""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_of_one_commit_without_other_changes(path):
    commit = json.loads(path.read_bytes()).get("commit")
    assert not (commit or "").endswith("-dirty")
    assert path.name in WITHOUT_COMMIT or re.fullmatch(r"[0-9a-f]{40}", commit or ""), commit


def test_each_result_is_there_once():
    """An older run of the same question would invite a choice among runs."""
    names = [path.name[11:] for path in RESULTS.glob("*.json")]
    assert sorted(names) == sorted(set(names))


def test_features_are_read_from_the_kernel(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: X\nflags\t\t: fpu avx2 avx512f amx_bf16\n\nprocessor\t: 1\n")
    assert here.cpu(file) == ("X", ["avx2", "avx512f", "amx_bf16"])
    file.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert here.cpu(file) == ("unknown", ["asimd", "asimddp"])
    assert here.cpu(tmp_path / "none") == ("unknown", [])

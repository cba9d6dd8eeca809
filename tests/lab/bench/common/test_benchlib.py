"""Workloads, definitions and results, without a server."""

from __future__ import annotations

import io
import json
import lzma
import subprocess

import numpy as np
import orjson
import pytest

from lab.bench.common import results
from lab.bench.common.client import Outcome
from lab.bench.common.latency import Measured, meets, peak_concurrency, peak_tokens, summarize, tbt_s
from lab.bench.common.results import Row, changes, commit, exceeded, marked, numbers, report, table, write_result
from lab.bench.common.trace import trace_specs
from lab.bench.common.workload import (
    Spec,
    TokenSource,
    as_text,
    in_rounds,
    prefix_repetition_specs,
    random_specs,
    with_arrivals,
)
from lab.loads.trace import read_trace

SOURCE = TokenSource(seed=1, vocab_size=2000)


def outcome(ttft: float, gaps: list[float], sent: float = 0.0, tokens: int | None = None) -> Outcome:
    """Times in seconds."""
    count = len(gaps) + 1 if tokens is None else tokens
    return Outcome(sent, 0.0, ttft, gaps, ttft + sum(gaps), 10, 4, count, True, None)


def test_tokens_are_a_function_of_seed_and_name():
    again = TokenSource(seed=1, vocab_size=2000)
    assert SOURCE.tokens(9, 2, 7) == again.tokens(9, 2, 7)
    assert SOURCE.tokens(9, 2, 7) != SOURCE.tokens(9, 2, 8)
    ids = SOURCE.tokens(5000, 0)
    assert min(ids) >= 250 and max(ids) < 2000


def test_random_prompts_share_exactly_the_prefix():
    specs = random_specs(SOURCE, 1, 20, input_len=30, output_len=10, prefix_len=8, range_ratio=0.5)
    assert len({tuple(spec.token_ids[:8]) for spec in specs}) == 1
    assert len({tuple(spec.token_ids[8:12]) for spec in specs}) == 20
    assert {len(spec.token_ids) - 8 for spec in specs} <= set(range(15, 46))
    assert len({spec.output_len for spec in specs}) > 1


def test_prefixes_are_used_equally_often():
    specs = prefix_repetition_specs(SOURCE, 1, 12, 16, 4, 3, 5)
    counts: dict[tuple[int, ...], int] = {}
    for spec in specs:
        counts[tuple(spec.token_ids[:16])] = counts.get(tuple(spec.token_ids[:16]), 0) + 1
    assert sorted(counts.values()) == [4, 4, 4]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 50.0])
def test_arrivals_keep_the_rate(burstiness):
    specs = with_arrivals([Spec([1], 1)] * 400, 1, request_rate=20, burstiness=burstiness)
    times = [spec.at_s for spec in specs]
    assert times == sorted(times) and times[-1] == pytest.approx(20)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.25)


def test_infinite_rate_is_all_at_once():
    assert {spec.at_s for spec in with_arrivals([Spec([1], 1, 5.0)] * 3, 1, float("inf"), 1)} == {0.0}


def test_rounds_cover_everything_once():
    specs = [Spec([i], 1, float(i + 1)) for i in range(10)]
    parts = in_rounds(specs, 3)
    assert [spec.token_ids[0] for part in parts for spec in part] == list(range(10))
    assert [part[0].at_s for part in parts] == [1.0, 1.0, 1.0]
    assert len(in_rounds(specs[:2], 5)) == 2


def test_text_keeps_shared_prefixes():
    assert as_text([5, 900, 31_999]).startswith(as_text([5, 900]) + " ")
    assert len({as_text([i]) for i in range(32_000)}) == 32_000


TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 50, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2]},
    {"timestamp": 6000, "input_length": 512, "output_length": 1, "hash_ids": [3]},
]


def write_trace(path, rows):
    data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_trace_prefixes_follow_hash_ids(tmp_path, name):
    specs = trace_specs(read_trace(write_trace(tmp_path / name, TRACE)), SOURCE, 10, 0.5, 1.0)
    assert [len(spec.token_ids) for spec in specs] == [1000, 1100, 512]
    assert [(spec.at_s, spec.output_len) for spec in specs] == [(0, 50), (1.5, 8), (3, 1)]
    assert specs[0].token_ids == specs[1].token_ids[:1000]
    assert specs[2].token_ids[0:16] != specs[0].token_ids[0:16]


def test_trace_lengths_scale_with_their_blocks(tmp_path):
    rows = list(read_trace(write_trace(tmp_path / "t.jsonl", TRACE)))
    small = trace_specs(rows, SOURCE, 2, 1.0, 1 / 32)
    assert [(len(spec.token_ids), spec.output_len) for spec in small] == [(31, 2), (34, 1)]
    assert small[0].token_ids == small[1].token_ids[:31]


@pytest.mark.parametrize(
    "row",
    [
        b"{}",
        b"nonsense",
        b"[]",
        b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        b'{"timestamp": 0, "input_length": "6", "output_length": 1, "hash_ids": [1]}',
        b'{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [-1]}',
        b'{"timestamp": null, "input_length": 6, "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_bad_trace_rows_are_named(tmp_path, row):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(orjson.dumps(TRACE[0]) + b"\n" + row + b"\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_trace(path))


def test_definitions():
    runs = [
        Measured([outcome(0.5, [0.1] * 9 + [1.1]), outcome(0.1, [], sent=1.0)], 4.0),
        Measured([Outcome(error="status 500")], 1.0),
    ]
    found = summarize(runs, ("ttft", "tpot", "itl", "tbt", "e2el"), (50, 99), {"ttft": 300})
    value = {name: number for name, (number, _) in found.items()}
    assert (value["completed"], value["failed"], value["duration"]) == (2, 1, 5.0)
    assert value["mean_ttft"] == pytest.approx(300)
    assert value["p50_ttft"] == value["median_ttft"] == pytest.approx(300)
    assert value["mean_tpot"] == pytest.approx(200)  # only the first has more than one token
    assert value["mean_itl"] == pytest.approx(200)
    assert value["mean_tbt"] == pytest.approx(1100)  # the longest of ten gaps
    assert value["mean_e2el"] == pytest.approx((2500 + 100) / 2)
    assert value["request_throughput"] == pytest.approx(2 / 5)
    assert value["request_goodput"] == pytest.approx(1 / 5)
    assert value["output_throughput"] == pytest.approx(12 / 5)
    assert value["total_cached_tokens"] == 8


def test_tbt_is_the_mean_of_the_longest_tenth():
    assert tbt_s([0.1] * 18 + [1.0, 2.0]) == pytest.approx(1.5)
    assert tbt_s([0.3]) == 0.3


def test_a_single_token_meets_any_tpot():
    assert meets(outcome(0.1, []), {"tpot": 0.0})
    assert not meets(outcome(0.1, [0.2]), {"tpot": 100.0})


def test_peaks():
    run = Measured([outcome(0.1, [0.1] * 4), outcome(0.1, [0.1], sent=0.3), outcome(0.1, [], sent=2.5)], 3.0)
    assert peak_concurrency(run) == 2
    assert peak_tokens(run) == 7
    assert peak_tokens(Measured([], 1.0)) == 0


def test_nothing_succeeded():
    found = summarize([Measured([Outcome()], 1.0)], ("ttft",), (99,), {})
    assert found["completed"] == (0, "requests")
    assert "mean_ttft" not in found


def test_results_as_table_and_json(tmp_path):
    rows = [
        Row("chat", "p90_ttft", "ms", 120.0, {"vllm": 100.0, "other": None}, {}, "peer other is missing: no answer"),
        Row("chat", "request_throughput", "requests/s", 3.0, {"vllm": 4.0, "other": None}, {"offered": 4.0}),
    ]
    out = io.StringIO()
    report({"flag": 1}, rows, tmp_path / "deep" / "out.json", out)
    first, *lines = out.getvalue().splitlines()
    assert first.split() == [
        "case",
        "metric",
        "unit",
        "ours",
        "vllm",
        "ours/vllm",
        "other",
        "ours/other",
        "offered",
        "ours/offered",
    ]
    assert lines[0].split() == ["chat", "p90_ttft", "ms", "120", "100", "1.20x", "missing"]
    assert lines[1].split() == ["chat", "request_throughput", "requests/s", "3", "4", "0.75x", "missing", "4", "0.75x"]
    assert "note: peer other is missing: no answer" in lines
    data = orjson.loads((tmp_path / "deep" / "out.json").read_bytes())
    assert set(data) == {"config", "commit", "rows"}
    assert set(data["rows"][0]) == {"case", "metric", "unit", "ours", "peers", "limits", "note"}
    assert data["rows"][0]["peers"] == {"vllm": 100.0, "other": None}
    assert data["config"]["machine"]["cores"] >= 1
    assert table([]) == "case  metric  unit  ours"


def test_results_name_files_of_this_machine_without_their_folders(tmp_path):
    """Also inside of texts and lists; addresses of APIs and files elsewhere are as they were."""
    config = {"argv": ["--json", str(tmp_path / "deep" / "out.json"), "--peer", "http://127.0.0.1:80/v1/models"]}
    note = f"FileNotFoundError: '{tmp_path}/a/b.json'; /proc/self/stat"
    out = tmp_path / "result.json"
    report(config, [Row("case", "TTFT", "ms", 1.0, note=note)], out, io.StringIO())
    read = orjson.loads(out.read_bytes())
    assert read["config"]["argv"] == ["--json", "out.json", "--peer", "http://127.0.0.1:80/v1/models"]
    assert read["rows"][0]["note"] == "FileNotFoundError: 'b.json'; /proc/self/stat"


def test_every_row_of_a_result_has_the_same_fields(tmp_path):
    """Numbers of a nested mapping become rows; a row that lacks a field that readers need is no result."""
    path = tmp_path / "out.json"
    found = numbers(
        "a node", {"requests": 3, "ttft_s": {"p50": 0.5}, "output_tokens_s": 7.0, "name": "x", "none": None}
    )
    write_result(
        {}, [*found, {"case": "b", "metric": "m", "unit": "", "ours": None, "seeds": [1]}], path, io.StringIO()
    )
    rows = json.loads(path.read_bytes())["rows"]
    assert [(row["metric"], row["unit"], row["ours"]) for row in rows[:3]] == [
        ("requests", "", 3.0),
        ("ttft_s p50", "s", 0.5),
        ("output_tokens_s", "1/s", 7.0),
    ]
    assert all({"case", "metric", "unit", "ours", "peers", "limits", "note"} <= set(row) for row in rows)
    assert rows[3]["seeds"] == [1]
    with pytest.raises(ValueError, match="without metric"):
        write_result({}, [{"case": "b", "gbs": 1.0}], path, io.StringIO())


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one commit: (its folder, git of it)."""
    folder = tmp_path / "checkout"
    folder.mkdir()

    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    (folder / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return folder, git


def test_other_changes_of_a_checkout_are_other_code(checkout):
    """Two dirty trees of one commit have the same name, so cells of one are no cells of the other."""
    folder, _ = checkout
    assert changes(folder) == "" and not commit(None, folder).endswith("-dirty")
    (folder / "code.py").write_text("2")
    once, named = changes(folder), commit(None, folder)
    (folder / "code.py").write_text("3")
    assert commit(None, folder) == named and named.endswith("-dirty")
    assert len({"", once, changes(folder)}) == 3
    (folder / "new.py").write_text("4")
    with_new = changes(folder)
    (folder / "new.py").write_text("5")
    assert len({once, with_new, changes(folder)}) == 3
    (folder / "new.py").unlink()
    (folder / "code.py").write_text("2")
    assert changes(folder) == once


def test_a_result_names_the_commit_of_its_beginning(checkout, tmp_path, monkeypatch):
    folder, git = checkout
    (folder / "results").mkdir()
    path = folder / "results" / "out.json"
    monkeypatch.setattr(results, "commit", lambda without=None: commit(without, folder))
    monkeypatch.setattr(results, "_begun", [began := commit(None, folder)])

    def written() -> str:
        write_result({}, [], path, io.StringIO())
        return str(json.loads(path.read_bytes())["commit"])

    assert [written(), written()] == [began] * 2  # the file of the first write is no change
    (folder / "code.py").write_text("2")
    assert written() == f"{began}-dirty"
    git("commit", "-q", "-a", "-m", "another, while the benchmark ran")
    assert written() == f"{began}-dirty" != commit(path, folder)


def test_percentiles_of_few_samples_say_so(tmp_path):
    few, enough = {"ours": 99, "vllm": 400}, {"ours": 100, "vllm": 400}
    said = "p99 of fewer than 100 samples: their largest, or close to it"
    assert marked(Row("c", "TTFT p99", "ms", 1.0, note="seen", samples=few)).note == f"seen; {said}"
    assert marked(Row("c", "p99_ttft", "ms", 1.0, samples=few)).note == said
    assert marked(Row("c", "TTFT p99", "ms", 1.0, samples=enough)).note == ""
    assert marked(Row("c", "TTFT p50", "ms", 1.0, samples=few)).note == ""
    assert marked(Row("c", "p999", "ms", 1.0, samples=few)).note == marked(Row("c", "p99", "ms", 1.0)).note == ""
    path = tmp_path / "out.json"
    mapping = {"case": "c", "metric": "p99", "unit": "ms", "ours": 1.0, "samples": few}
    write_result({}, [mapping, Row("c", "p99", "ms", 1.0)], path, io.StringIO())
    first, second = json.loads(path.read_bytes())["rows"]
    assert first["note"] == said and first["samples"] == few and "samples" not in second


def test_limits_of_times_and_copies_are_checked_too(tmp_path):
    rows = [
        Row("c", "TTFT", "ms", 1.0, limits={"floor": 2.0}),
        Row("c", "TTFT", "ms", 1.0, limits={"floor": 0.5, "goal": 2.0, "memcpy": 3.0}),
        Row("c", "all_reduce", "GB/s", 11.0, limits={"memcpy": 10.0}),
        Row("c", "KV over 1 Gbit/s", "GB/s", 0.2, limits={"line rate": 0.125}),  # coded bytes are fewer
        Row("c", "accepted", "1/s", 9.0, limits={"goal": 1.0}),
    ]
    assert [exceeded(row) for row in rows] == [["floor"], [], ["memcpy"], [], []]
    assert marked(rows[0]).note == "invalid limit floor: a time is below it"
    assert marked(marked(rows[2])).note == "invalid limit memcpy: a rate exceeds it"
    path = tmp_path / "out.json"
    write_result({}, [{"case": "c", "metric": "m", "unit": "ms", "ours": 1.0, "limits": {"floor": 2.0}}], path)
    assert json.loads(path.read_bytes())["rows"][0]["note"] == "invalid limit floor: a time is below it"

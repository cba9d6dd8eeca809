"""The runner of fault scenarios: flags, the result file, the exit code; and the checks that follow a fault."""

from __future__ import annotations

import json
import mmap
import os
from argparse import ArgumentParser, Namespace

import pytest

from lab.bench.common.results import Row
from lab.faults import kill_roles, stop_nodes
from lab.faults.checks import growth_rows, own_bytes
from lab.faults.client import Load, Stream
from lab.faults.namespaces import NoNamespaces
from lab.faults.runner import EMBEDDED, TINY, UNAVAILABLE, Run, Scenario, run


def scenario(play, **changed) -> Scenario:
    def add_flags(parser: ArgumentParser) -> None:
        parser.add_argument("--streams", type=int, default=16)
        parser.add_argument("--nodes", default="mixed=2")

    quick = {"streams": 4, "nodes": "mixed=1"}
    return Scenario("about it", add_flags, play, quick, **changed)


def test_the_result_tells_flags_rows_and_what_was_wrong(tmp_path, capsys):
    def play(this: Run) -> None:
        assert this.folder().is_dir()
        this.facts = {"model": "tiny"}
        this.rows.append(Row("a case", "requests", "", 3.0))
        this.wrong.append("a token")

    out = tmp_path / "out.json"
    assert run(scenario(play), ["--quick", "--seed", "7", "--json", str(out)]) == 1
    told = json.loads(out.read_text())
    config = {"streams": 4, "nodes": "mixed=1", "seed": 7, "model": "tiny", "wrong": 1}
    assert {name: told["config"][name] for name in config} == config
    assert [(row["case"], row["metric"], row["ours"]) for row in told["rows"]] == [("a case", "requests", 3.0)]
    said = capsys.readouterr()
    assert "seed 7" in said.out and "WRONG: a token" in said.err


def test_a_scenario_takes_the_model_that_nodes_serve_by_default(tmp_path):
    """Runs with random weights alone would say nothing about the default shape and model."""
    flags = {name: Run(Namespace(model=name), [], tmp_path).model_flags() for name in (EMBEDDED, TINY, "a/path")}
    assert flags[EMBEDDED] == ["--dtype", "float32"]
    assert flags["a/path"] == ["--model", "a/path", "--dtype", "float32"]
    assert "dummy" in flags[TINY] and "float32" in flags[TINY]
    for scenario_of in (kill_roles, stop_nodes):
        parser = ArgumentParser()
        scenario_of.add_flags(parser)
        assert parser.parse_args(["--model", EMBEDDED]).model == EMBEDDED


def test_nothing_wrong_is_exit_code_0_and_no_namespaces_is_3(capsys):
    def without(this: Run) -> None:
        raise NoNamespaces("not root")

    assert run(scenario(lambda this: None), []) == 0
    assert run(scenario(without), []) == UNAVAILABLE
    assert "not root" in capsys.readouterr().err


def test_only_some_scenarios_pass_flags_on(capsys):
    found = []
    with pytest.raises(SystemExit):
        run(scenario(lambda this: None), ["--dtype", "float32"])
    assert "--dtype" in capsys.readouterr().err
    assert run(scenario(lambda this: found.extend(this.node_flags), passes_flags=True), ["--dtype", "float32"]) == 0
    assert found == ["--dtype", "float32"]


def test_each_request_is_compared_with_what_its_body_gave(tmp_path):
    this = Run(None, [], tmp_path)
    load = Load([], [{}, {}], "load")
    load.requests = [(1, Stream(tokens=[4])), (0, Stream(tokens=[1, 2])), (1, Stream(tokens=[5]))]
    assert this.compare("cut", [Stream(tokens=[1, 2]), Stream(tokens=[4])], load) == 1
    assert this.wrong == ["cut: stream 2 differs from token 0 on (1 tokens)"]


def test_growth_is_from_the_first_sample_to_the_last():
    samples = [{"a": 10 << 20, "b": 10 << 20}, {"a": 90 << 20, "b": 0}, {"a": 11 << 20, "b": 13 << 20}]
    rows, grown = growth_rows(samples, 2 << 20, "the first round")
    assert [(row.case, row.metric, row.ours) for row in rows] == [
        ("memory", "growth of a since the first round", 1.0),
        ("memory", "growth of b since the first round", 3.0),
    ]
    assert len(grown) == 1 and "growth of b" in grown[0]


def test_own_bytes_grow_with_what_a_process_writes():
    """Fresh pages: what the allocator has free from earlier tests is counted already."""
    size = 64 << 20
    before = own_bytes(os.getpid())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * size)
        assert own_bytes(os.getpid()) - before >= size // 2

"""The runner of fault scenarios: flags, the result file, the exit code; and the checks that follow a fault."""

from __future__ import annotations

import json
import mmap
import os
from argparse import ArgumentParser, Namespace

import pytest

from lab.bench.common.results import Row
from lab.faults import checks, kill_roles, runner, stop_nodes
from lab.faults.checks import Memory, growth_row, own_bytes
from lab.faults.client import Load, Stream
from lab.faults.networks.namespaces import Namespaces, NoNamespaces
from lab.faults.runner import EMBEDDED, TINY, UNAVAILABLE, Run, Scenario, run
from lab.launch.nodes import parse_nodes


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


def test_a_scenario_that_breaks_off_has_failed_and_keeps_what_it_found(tmp_path, capsys):
    def play(this: Run) -> None:
        this.rows.append(Row("round 1", "requests", "", 3.0))
        this.wrong.append("a token")
        raise TimeoutError("the living nodes are not one cluster")

    out = tmp_path / "out.json"
    assert run(scenario(play), ["--json", str(out)]) == 1
    told, said = json.loads(out.read_text()), capsys.readouterr().err
    assert [row["case"] for row in told["rows"]] == ["round 1"] and told["config"]["wrong"] == 2
    assert "WRONG: a token" in said and "WRONG: the scenario broke off: TimeoutError" in said
    assert "in play" in said, "where it broke off"


def test_nodes_that_nobody_can_start_are_a_wrong_flag(capsys):
    def play(this: Run) -> None:
        parse_nodes(this.args.nodes)

    with pytest.raises(SystemExit) as stopped:
        run(scenario(play), ["--nodes", "prefil=2"])
    assert stopped.value.code == 2 and "--nodes" in capsys.readouterr().err.splitlines()[-1]


def test_a_cut_that_cannot_be_made_is_no_lack_of_namespaces(monkeypatch, capsys):
    """Tests skip what needs namespaces: a heal that fails would be skipped too."""

    def play(this: Run) -> None:
        network = Namespaces(["a"])
        monkeypatch.setattr(network, "prefix", lambda name: ["false"])
        network.cut("a", "out")

    assert run(scenario(play), []) == 1
    assert "ToolFailed" in capsys.readouterr().err


def test_only_some_scenarios_pass_flags_on(capsys):
    found = []
    with pytest.raises(SystemExit):
        run(scenario(lambda this: None), ["--dtype", "float32"])
    assert "--dtype" in capsys.readouterr().err
    assert run(scenario(lambda this: found.extend(this.node_flags), passes_flags=True), ["--dtype", "float32"]) == 0
    assert found == ["--dtype", "float32"]


class FakeNode:
    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid, self.alive, self.url = name, pid, True, ""


class FakeCluster:
    """Nodes with these process ids."""

    api_key = None

    def __init__(self, **pids: int) -> None:
        self.nodes = [FakeNode(name, pid) for name, pid in pids.items()]

    def __getitem__(self, name: str) -> FakeNode:
        return next(node for node in self.nodes if node.name == name)


def test_every_request_is_judged_by_what_its_body_gave(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "settle", lambda cluster: [])
    monkeypatch.setattr(runner, "blocks_held", lambda cluster: 0)
    this = Run(None, [], tmp_path)
    load = Load([], [{}, {}], "load")
    load.requests = [
        (1, Stream(tokens=[4])),
        (0, Stream(tokens=[1, 2])),
        (1, Stream(tokens=[5])),
        (0, Stream(error="503: no")),
    ]
    this.judge("cut", FakeCluster(), [Stream(tokens=[1, 2]), Stream(tokens=[4])], load)
    assert this.wrong == ["cut: stream 2 differs from token 0 on (1 tokens)", "cut: stream 3 failed: 503: no"]
    rows = {row.metric: row.ours for row in this.rows}
    assert rows == {
        "requests": 4.0, "errors": 1.0, "wrong tokens": 1.0, "blocks held afterwards": 0.0, "memory growth": None,
    }  # fmt: skip


def test_nothing_is_no_proof(tmp_path, monkeypatch):
    """No request, and answers without a token on both sides, are equal to each other."""
    monkeypatch.setattr(runner, "settle", lambda cluster: [])
    monkeypatch.setattr(runner, "blocks_held", lambda cluster: 0)
    this = Run(None, [], tmp_path)
    load = Load([], [{}], "load")
    this.judge("cut", FakeCluster(), [Stream()], load)
    load.requests = [(0, Stream())]
    this.judge("healed", FakeCluster(), [Stream()], load)
    assert this.wrong == ["cut: no request was sent, so nothing was compared", "healed: stream 0 has no token"]


def test_an_undisturbed_answer_must_be_whole(tmp_path, monkeypatch):
    async def answered(url, bodies, *others):
        return [Stream(tokens=[1, 2]), Stream(tokens=[1]), Stream(), Stream(tokens=[3], error="503: no")]

    monkeypatch.setattr(runner, "each_once", answered)
    this = Run(None, [], tmp_path)
    this.calm(FakeCluster(a=os.getpid()), "a", [{"max_tokens": 2}] * 4)
    assert this.wrong == [
        "undisturbed: 1 of 2 tokens", "undisturbed: 0 of 2 tokens", "undisturbed: 503: no",
    ]  # fmt: skip


def test_memory_is_compared_within_one_process(monkeypatch):
    """A restarted node is another process: comparing it with its predecessor would hide or invent growth."""
    held = {1: 10 << 20, 2: 10 << 20, 3: 90 << 20}
    monkeypatch.setattr(checks, "own_bytes", held.__getitem__)
    memory = Memory()
    assert memory.growth(FakeCluster(a=1, b=2)) == {}
    held[1] = 13 << 20
    assert memory.growth(FakeCluster(a=1, b=3)) == {"a": 3.0}
    held[3] = 95 << 20
    assert memory.growth(FakeCluster(a=1, b=3)) == {"a": 3.0, "b": 5.0}


def test_the_growth_of_every_node_is_told_and_the_largest_is_the_row():
    row, grown = growth_row("decode killed", {"a": 1.0, "b": 3.0}, 2 << 20)
    assert (row.metric, row.ours, row.limits) == ("memory growth", 3.0, {"most": 2.0})
    assert "a +1.0 MiB" in row.note and "b +3.0 MiB" in row.note
    assert grown == ["decode killed: b grew by 3.0 MiB"]
    assert growth_row("decode killed", {}, 2 << 20)[0].ours is None


def test_own_bytes_grow_with_what_a_process_writes():
    """Fresh pages: what the allocator has free from earlier tests is counted already."""
    size = 64 << 20
    before = own_bytes(os.getpid())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * size)
        assert own_bytes(os.getpid()) - before >= size // 2

"""The ranks scenario: what it calls wrong, and that it runs."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.faults import rank_changes, ranks
from lab.faults.rank_changes import Changes
from lab.faults.runner import Run


class FakeNode:
    """A node whose masked ranks are those of `health`, one answer after the other; then none."""

    def __init__(self, health: list[dict[str, str]], times_masked: int = 0) -> None:
        self.health, self.times_masked = health, times_masked

    def get(self, url: str) -> dict[str, Any]:
        if url.endswith("/health"):
            return {"status": "ok"} | ({"masked_ranks": self.health.pop(0)} if self.health else {})
        assert url == "http://n/debug/state"
        return {"engine": {"experts": {"times_masked": self.times_masked, "masked": {"1": "why"}}}}


@pytest.fixture
def scene(monkeypatch, tmp_path):
    def made(node: FakeNode) -> tuple[Run, Any]:
        monkeypatch.setattr(ranks.rest, "get", node.get)
        return Run(Namespace(), [], tmp_path), {ranks.NODE: SimpleNamespace(url="http://n")}

    return made


def test_a_rank_must_come_back(scene, monkeypatch):
    monkeypatch.setattr(ranks, "BACK_S", 0.3)
    this, cluster = scene(FakeNode([{"1": "why"}] * 1))
    ranks._back(this, cluster, "a case")
    assert this.wrong == []
    this, cluster = scene(FakeNode([{"1": "why"}] * 1000))
    ranks._back(this, cluster, "a case")
    assert this.wrong == ["a case: not back in 0.3 s: {'1': 'why'}"]


@pytest.mark.parametrize(("masked", "wrong"), [(0, []), (3, []), (4, ["ranks were masked 4 times for 3 faults"])])
def test_more_masks_than_faults_are_wrong(scene, masked, wrong):
    this, cluster = scene(FakeNode([], masked))
    ranks._no_false_masks(this, cluster, 3)
    assert this.wrong == wrong
    assert [(row.metric, row.ours) for row in this.rows] == [("ranks masked", float(masked))]


def test_its_flags():
    parser = ArgumentParser()
    ranks.add_flags(parser)
    args = parser.parse_args([])
    assert (args.ranks, args.rounds, args.stop_s) == (4, 1, 4.0)
    for wrong in (["--ranks", "0"], ["--stop-s", "0"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


class FakeNodes:
    """Nodes by name: what they tell of their ranks."""

    def __init__(self, **experts: dict[str, Any]) -> None:
        self.experts = experts

    def get(self, url: str) -> dict[str, Any]:
        _, _, name, path = url.split("/", 3)
        experts = self.experts[name]
        return {"masked_ranks": experts["masked"]} if path == "health" else {"engine": {"experts": experts}}


def changes(monkeypatch, tmp_path, **experts: dict[str, Any]) -> Changes:
    monkeypatch.setattr(rank_changes.rest, "get", FakeNodes(**experts).get)
    cluster: Any = {name: SimpleNamespace(url=f"http://{name}") for name in experts}
    return Changes(Run(Namespace(tokens=3), [], tmp_path), cluster, [*experts], [], [])


def test_each_node_has_its_own_view_of_the_ranks(monkeypatch, tmp_path):
    masks: dict[str, Any] = {"masked": {"1": "why"}, "times_masked": 3, "remote": {"nodes": ["a", "b"]}}
    well: dict[str, Any] = {"masked": {}, "times_masked": 1, "remote": {"nodes": ["b"]}}
    both = changes(monkeypatch, tmp_path, a=masks, b=well)
    assert not both.whole() and not both.lack("1") and not both.alone()
    other = changes(monkeypatch, tmp_path, n=well)
    assert other.whole() and other.alone()
    both = changes(monkeypatch, tmp_path, a=masks, b=masks)
    assert both.lack("1") and not both.lack("0")
    both = changes(monkeypatch, tmp_path, a=masks, b=well)
    both.masked_at_most("a case", {"a": 2, "b": 2})
    assert both.this.wrong == ["a case, a: ranks were masked 3 times for 2 faults"]
    assert [row.ours for row in both.this.rows] == [3.0, 1.0]


def test_a_change_that_is_never_over_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_changes, "CHANGE_S", 0.0)
    made = changes(monkeypatch, tmp_path, a={"masked": {}})
    done: list[int] = []
    load, began = asyncio.run(made._changed("a case", lambda: done.append(1), lambda: len(done) > 1))
    assert made.this.wrong == ["a case: not over in 0 s"] and done == [1] and not load.requests and began > 0


@pytest.mark.heavy
def test_it_runs_and_finds_nothing_wrong(tmp_path):
    """Two ranks: one is killed, and stopped; then the three rules without copies, ranks that join and leave, and two
    nodes that share their ranks."""
    out = tmp_path / "out.json"
    small = ["--ranks", "2", "--streams", "3", "--tokens", "60", "--prompt-tokens", "60", "--stop-s", "2"]
    assert ranks.main([*small, "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    masked = {row["case"]: row["ours"] for row in told["rows"] if row["metric"] == "ranks masked"}
    assert masked["whole run"] >= 1 and masked["added ranks, mixed-0"] <= 2
    assert masked["shared ranks, mixed-0"] <= 2 and masked["after the loss of a node, mixed-1"] <= 2

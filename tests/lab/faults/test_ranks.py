"""The ranks scenario: what it calls wrong, and that it runs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.faults import ranks
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


@pytest.mark.heavy
def test_it_runs_and_finds_nothing_wrong(tmp_path):
    """Two ranks: one is killed, and stopped; then the three rules without copies."""
    out = tmp_path / "out.json"
    small = ["--ranks", "2", "--streams", "3", "--tokens", "60", "--prompt-tokens", "60", "--stop-s", "2"]
    assert ranks.main([*small, "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    masked = {row["case"]: row["ours"] for row in told["rows"] if row["metric"] == "ranks masked"}
    assert masked["whole run"] >= 1

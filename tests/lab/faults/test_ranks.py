"""The ranks scenario: what it calls wrong, and that it runs."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.model.experts.losses import Loss
from lab.faults import rank_changes, ranks
from lab.faults.client import Stream
from lab.faults.rank_changes import Changes
from lab.faults.runner import Run

CALM = [Stream(tokens=[1, 2, 3]), Stream(tokens=[4, 5, 6])]


def sent(*streams: Stream) -> Any:
    """Body 0, 1, 0, 1, ..., all begun at 0."""
    return SimpleNamespace(streams=streams, requests=[(n % 2, one) for n, one in enumerate(streams)])


def well(body: int) -> Stream:
    return Stream(tokens=CALM[body].tokens, at=[1.0, 2.0, 3.0])


LOST = Stream(tokens=[1], at=[1.0], error=f"503: {Loss(3, (1,), True).reason}")
LATER = Stream(begun=2.7, tokens=[1, 2, 3], at=[2.8, 2.9, 3.0])
LESS = Stream(tokens=[4, 5, 7], at=[1.0, 2.0, 3.0], dropped_experts=9)


@pytest.mark.parametrize(
    ("rule", "load", "lost"),
    [
        (ranks.WAIT, sent(well(0), well(1)), 0),
        (ranks.DROP, sent(well(0), LESS), 9),
        (ranks.FAIL, sent(LOST, well(1)), 3),
    ],
)
def test_what_each_rule_allows(rule, load, lost):
    rows, wrong = ranks.by_rule("a case", rule, CALM, load, lost, began=2.5)
    assert wrong == []
    found = {row.metric: row.ours for row in rows}
    assert found["wrong tokens"] == 0 and found["results that steps did without"] == lost
    assert found["whole answers, under way at the fault"] == (2 if rule == ranks.WAIT else 1)
    rows, _ = ranks.by_rule("a case", rule, CALM, load, lost, began=4.0)
    assert {row.metric: row.ours for row in rows}["whole answers, under way at the fault"] == 0


@pytest.mark.parametrize(
    ("rule", "load", "lost", "wrong"),
    [
        (ranks.WAIT, sent(well(0), well(1)), 2, "2 results of experts are missing"),
        (ranks.WAIT, sent(LOST, well(1)), 0, "lost with rank 1"),
        (ranks.DROP, sent(LOST, LESS, well(0)), 9, "lost with rank 1"),
        (ranks.DROP, sent(well(0), well(1)), 9, "the answers say that 0 results of experts are missing, the node 9"),
        (ranks.DROP, sent(well(0), LESS), 10, "say that 9 results of experts are missing, the node 10"),
        (ranks.DROP, sent(well(0), replace(LESS, dropped_experts=0)), 9, "stream 1 differs from token 2"),
        (ranks.DROP, sent(well(0), well(1)), 0, "the rule was not tried"),
        (ranks.FAIL, sent(well(0), well(1)), 3, "no request failed, so the rule was not tried"),
        (ranks.FAIL, sent(LOST, LOST), 3, "no answer is whole"),
        (ranks.FAIL, sent(replace(LOST, error="503: no"), well(1)), 3, "503: no"),
        (ranks.FAIL, sent(LOST, replace(LOST, error="connection lost"), well(0)), 3, "connection lost"),
        (ranks.FAIL, sent(replace(LOST, error=Loss(3, (2,), True).reason), well(1)), 3, "lost with rank 2"),
        (ranks.WAIT, sent(LATER, replace(LATER, tokens=CALM[1].tokens)), 0, "none has waited"),
        (ranks.FAIL, sent(LOST, well(1), well(1)), 3, "stream 1 differs from token 0"),
        (ranks.FAIL, sent(LOST, well(1), well(0), LESS), 3, "1 answers did without experts"),
    ],
)
def test_what_each_rule_forbids(rule, load, lost, wrong):
    _, found = ranks.by_rule("a case", rule, CALM, load, lost, began=2.5)
    assert any(wrong in text for text in found) and all(text.startswith("a case: ") for text in found)


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


def test_a_fault_is_over_when_all_have_noticed_it_and_nobody_is_masked(monkeypatch, tmp_path):
    a, b = ({"masked": {}, "times_masked": 2} for _ in range(2))
    over = changes(monkeypatch, tmp_path, a=a, b=b).masked_and_back()
    assert not over()
    a["times_masked"] = 3
    assert not over()
    b |= {"times_masked": 3, "masked": {"1": "why"}}
    assert not over()
    b["masked"] = {}
    assert over()


def test_a_rank_that_is_masked_between_two_looks_is_not_back(monkeypatch, tmp_path):
    node: dict[str, Any] = {"masked": {}, "times_masked": 2}
    made = changes(monkeypatch, tmp_path, a=node)
    over, get = made.masked_and_back(), rank_changes.rest.get

    def looked(url: str) -> dict[str, Any]:
        found = json.loads(json.dumps(get(url)))
        node.update(masked={"1": "why"}, times_masked=3)
        return found

    monkeypatch.setattr(rank_changes.rest, "get", looked)
    assert not over() and not over()


def test_a_change_that_is_never_over_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_changes, "CHANGE_S", 0.0)
    made = changes(monkeypatch, tmp_path, a={"masked": {}})
    done: list[int] = []
    load, began = asyncio.run(made._changed("a case", lambda: done.append(1), lambda: len(done) > 1))
    assert made.this.wrong == ["a case: not over in 0 s"] and done == [1] and not load.requests and began > 0


@pytest.mark.heavy
def test_it_runs_and_finds_nothing_wrong(tmp_path):
    """Two ranks: one is killed, and stopped; then the three rules without copies, a rank that is cut off, ranks that
    join and leave, and two nodes that share their ranks."""
    out = tmp_path / "out.json"
    small = ["--ranks", "2", "--streams", "3", "--tokens", "60", "--prompt-tokens", "60", "--stop-s", "2"]
    assert ranks.main([*small, "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    masked = {row["case"]: row["ours"] for row in told["rows"] if row["metric"] == "ranks masked"}
    assert masked["whole run"] >= 1 and masked["added ranks, mixed-0"] <= 2
    assert masked["a rank over TCP, mixed-0"] == 2
    assert masked["shared ranks, mixed-0"] <= 4 and masked["after the loss of a node, mixed-1"] <= 4

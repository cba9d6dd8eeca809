"""Ranks on busy cores: what the scenario calls wrong, and that it runs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lab.faults import rank_changes
from lab.faults.client import Stream
from lab.faults.rank_changes import Changes
from lab.faults.runner import Run
from lab.faults.soak import busy_ranks

CALM = [Stream(tokens=[1, 2]), Stream(tokens=[3, 4])]
WELL = [(0, Stream(tokens=[1, 2])), (1, Stream(tokens=[3, 4])), (0, Stream(tokens=[1, 2]))]


@pytest.mark.parametrize(
    ("requests", "masked", "pairs", "wrong"),
    [
        (WELL, 0, [5, 5], []),
        ([*WELL, (1, Stream(error="503: lost"))], 0, [5, 5], ["soak: stream 3 failed: 503: lost"]),
        ([(1, Stream(tokens=[3, 5]))], 0, [5, 5], ["soak: stream 0 differs from token 1 on (2 tokens)"]),
        (WELL, 1, [5, 5], ["soak, n: ranks were masked 1 times for 0 faults"]),
        (WELL, 0, [5, 0], ["rank 1 computed nothing"]),
    ],
)
def test_what_is_wrong(monkeypatch, tmp_path, requests, masked, pairs, wrong):
    node = SimpleNamespace(name="n", url="http://n", alive=False)
    cluster: Any = type("Nodes", (dict,), {"nodes": [node]})({"n": node})
    experts = {"times_masked": masked, "pairs_by_rank": pairs}
    parts: list[float] = []
    load = SimpleNamespace(requests=requests, streams=[one for _, one in requests])

    async def part(url: str, bodies: Any, name: str, seconds: float) -> Any:
        parts.append(seconds)
        return load

    monkeypatch.setattr(rank_changes.rest, "get", lambda url: {"engine": {"experts": experts}})
    monkeypatch.setattr(Run, "cluster", lambda *given: nullcontext(cluster))
    monkeypatch.setattr(Changes, "of", lambda this, cluster, name: Changes(this, cluster, [name], [], CALM))
    monkeypatch.setattr(busy_ranks, "spinning", lambda count: nullcontext())
    monkeypatch.setattr(busy_ranks, "_part", part)
    clock = iter(range(100))  # time for two parts
    monkeypatch.setattr(busy_ranks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    this = Run(Namespace(soak_s=4, busy=2, ranks=2), [], tmp_path)
    busy_ranks.play(this)
    assert parts == [1.0, 1.0], "memory is first seen after a quarter of a short run"
    assert {*this.wrong} == {*wrong}
    rows = {row.metric: row.ours for row in this.rows}
    assert rows["requests"] == 2 * len(requests) and rows["ranks masked"] == masked
    assert rows["errors"] + rows["wrong tokens"] == (2 if "stream" in "".join(wrong) else 0)


def test_its_flags():
    parser = ArgumentParser()
    busy_ranks.add_flags(parser)
    args = parser.parse_args([])
    assert (args.soak_s, args.ranks) == (3600.0, 4) and args.busy >= 1
    for wrong in (["--soak-s", "0"], ["--busy", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


@pytest.mark.heavy
def test_it_runs_and_finds_nothing_wrong(tmp_path):
    out = tmp_path / "out.json"
    small = ["--ranks", "2", "--streams", "3", "--tokens", "40", "--prompt-tokens", "60", "--soak-s", "5"]
    assert busy_ranks.main([*small, "--json", str(out)]) == 0
    rows = {row["metric"]: row["ours"] for row in json.loads(out.read_text())["rows"]}
    assert rows["ranks masked"] == 0 and rows["requests"] >= 3

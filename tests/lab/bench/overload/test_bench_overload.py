"""Overload: what clients of real nodes saw, as rows."""

from __future__ import annotations

from lab.bench.common.client import Outcome
from lab.bench.overload import command as bench_overload
from lab.bench.overload.live import Seen, objectives, rows_of


def test_without_live_it_is_the_simulated_ablation(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(bench_overload.ablate, "main", lambda argv: asked.append(argv) or 0)
    assert bench_overload.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    assert asked == [["overload", "--requests", "500", "--seeds", "1", "--json", str(tmp_path / "out.json")]]


def test_what_clients_of_real_nodes_saw():
    """Their objectives are those of the nodes, here a tenth of 5 s and 100 ms."""
    good, late = Outcome(ttft_s=0.4, prompt_tokens=100, error=None), Outcome(ttft_s=0.6, prompt_tokens=300, error=None)
    slow = Outcome(ttft_s=0.4, e2e_s=0.44, output_tokens=3, prompt_tokens=200, error=None)
    refused, lost = Outcome(error="status 429: no"), Outcome(error="status 503: no")
    after = Outcome(error="in the stream: estimated time per token 0.2 s, the objective of standard is 0.1 s")
    wanted = objectives({"slo": "standard:ttft=5,tbt=0.1;batch:ttft=1", "slo_scale": 0.1})
    seen = Seen([good, good, late, slow, refused, after, lost, lost], seconds=4.0, computed=1000.0, wanted=wanted)
    rows = {row.metric: row.ours for row in rows_of("x", seen, 2.0)}
    assert rows == {
        "goodput": 0.5,
        "refused": 2 / 8,
        "refused after prefill": 1 / 8,
        "late to the first token": 1 / 8,
        "slow to decode": 1 / 8,
        "failed otherwise": 2 / 8,
        "prefill wasted on refused": 0.3,
        "prefill spent on late": 0.5,
    }


def test_an_unknown_variant_is_named(capsys):
    assert bench_overload.main(["--live", "--variants", "early,never"]) == 2
    assert "never" in capsys.readouterr().err

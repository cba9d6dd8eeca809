"""The simulated cluster conserves requests, and the variants differ where the paper says they do."""

from __future__ import annotations

import json

import pytest

from sched.rejection import rejections
from scripts import bench_overload
from scripts.benchlib.client import Outcome
from scripts.overloadbench.driver import Cluster, arrivals, capacity
from scripts.overloadbench.live import Seen, objectives, rows_of
from scripts.overloadbench.machines import Decode, Speed

SPEED = Speed()


@pytest.fixture(scope="module")
def results():
    offered = arrivals(600, 2 * capacity(SPEED, 4, 4, arrivals(1000, 1.0, 1)), 1)
    return {name: Cluster(name, 4, 4, SPEED, 1).run(list(offered)) for name in rejections}


@pytest.mark.parametrize("name", sorted(rejections))
def test_every_request_ends_once(results, name):
    counts = results[name].counts
    ended = counts["finished"] + counts["refused at arrival"] + counts["refused after prefill"]
    assert ended == results[name].offered == 600
    assert results[name].good + counts["late to the first token"] + counts["slow"] == counts["finished"]


def test_refusing_saves_the_goodput_and_only_the_baseline_throws_prefill_away(results):
    for name in ("stage-load", "early", "predicted"):
        assert results[name].good > 3 * results["none"].good
    wasted = {name: result.wasted_tokens for name, result in results.items()}
    assert wasted["stage-load"] > 0 and wasted["early"] == wasted["predicted"] == wasted["none"] == 0


def test_a_decode_node_shares_its_steps():
    """Alone 10 tokens take 10 steps of 27 ms; two requests make each other's steps 2 ms longer."""
    node = Decode(SPEED, 8)
    node.join(0.0, 1, 10)
    assert node.next_end() == pytest.approx(0.27)
    node.join(0.135, 2, 10)
    assert node.next_end() == pytest.approx(0.135 + 5 * 0.029)
    assert node.leave(node.next_end()) == 1
    assert node.next_end() == pytest.approx(0.135 + 5 * 0.029 + 5 * 0.027)


def test_a_small_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert bench_overload.main(["--quick", "--requests", "200", "--json", str(path)]) == 0
    cases = {row["case"] for row in json.loads(path.read_bytes())["rows"]}
    assert cases == {f"--rejection {name}" for name in rejections}
    assert "capacity" in capsys.readouterr().out


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

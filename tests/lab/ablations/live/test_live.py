"""Questions to real nodes: the same requests by the same seed, the figures, and the commands against stand-ins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from lab.ablations import command as ablate
from lab.ablations.common.ablation import Estimated
from lab.ablations.common.metrics import COSTS
from lab.ablations.live import overload
from lab.ablations.live import play as live_play
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.fetches import Fetches, summed
from lab.ablations.live.loads import LIVE_BLOCK, Shape, in_blocks, requests, scaled, specs
from lab.ablations.live.play import Played, costs, figures
from lab.ablations.live.run import at_urls
from lab.ablations.live.search import Objectives, try_rate
from lab.ablations.live.shares import Watch
from lab.ablations.live.shifts import LOADS, RATE_S, generated
from lab.ablations.live.table import DEFAULT_REASON, LIVE, why_not
from lab.ablations.live.twin import base_model, simulate, twin
from lab.ablations.simulated import ABLATIONS
from lab.bench.common.client import Outcome
from lab.bench.common.workload import Spec
from lab.formulas.bisect import Tried
from lab.launch import rest
from lab.loads.trace import TraceRow
from lab.planning import capacity
from lab.simulator.models.step_models import EMBEDDED_CPU

ESTIMATE = Estimated(1.0, 0.1)
FAKE = str(Path(__file__).parents[2] / "fake_openai.py")
NODE = {
    "kv_cache_bytes": 23040 * 6400, "max_num_batched_tokens": 1024, "max_num_seqs": 64, "placement": "mooncake",
    "queue_order": "edf", "eviction": "lru", "batching_policy": "dynamic", "prefill_chunk_tokens": 256,
    "tbt_budget_ms": 100.0, "slo": "standard:ttft=3", "block_size": 16, "max_step_ms": 1000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that streams a token every millisecond."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--cached", "7"]
    with subprocess.Popen([sys.executable, FAKE, *flags], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    rest.get(f"http://127.0.0.1:{port}/health")
                    break
                except rest.RestError:
                    time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_requests_are_those_of_their_seed_and_share_whole_blocks():
    shape = Shape(prompt=(300.0, 0.5), shared=0.9, documents=2, most=700, rate=5.0)
    rows = requests(shape, 3, 40.0)
    assert rows == requests(shape, 3, 40.0) != requests(shape, 4, 40.0)
    assert all(row.input_length <= 700 and -(-row.input_length // LIVE_BLOCK) == len(row.hash_ids) for row in rows)
    sent = specs(rows, 3)
    assert [len(spec.token_ids) for spec in sent] == [row.input_length for row in rows]
    pairs = [(a, b) for a in range(30) for b in range(a) if rows[a].hash_ids[0] == rows[b].hash_ids[0]]
    assert pairs and all(sent[a].token_ids[:8] == sent[b].token_ids[:8] for a, b in pairs)
    assert sent[0].token_ids != specs(rows, 4)[0].token_ids
    with pytest.raises(ValueError, match="--rate"):
        requests(Shape(rate=1e-9), 0, 1.0)


def test_a_trace_for_a_small_model():
    rows = [TraceRow(3000.0 * i, 8000, 400, [0, *range(100 * i, 100 * i + 15)]) for i in range(20)]
    made = scaled(rows, rate=2.0, seconds=5.0)
    assert 9 <= len(made) <= 11 and all(row.input_length == 1000 and row.output_length == 50 for row in made)
    first, second = specs(made[:2], 0)
    assert first.token_ids[:LIVE_BLOCK] == second.token_ids[:LIVE_BLOCK]
    assert first.token_ids[LIVE_BLOCK : LIVE_BLOCK + 9] != second.token_ids[LIVE_BLOCK : LIVE_BLOCK + 9]
    with pytest.raises(ValueError, match="--rate"):
        scaled(rows[:1], 1.0, 5.0)


def test_figures_of_outcomes():
    good = Outcome(
        ttft_s=1.0, itl_s=[0.1, 0.3], e2e_s=1.4, prompt_tokens=100, cached_tokens=25, output_tokens=3, error=None
    )
    late = Outcome(ttft_s=3.0, itl_s=[], e2e_s=3.0, prompt_tokens=100, output_tokens=1, error=None)
    refused, broken = Outcome(error="status 429: full"), Outcome(error="reset")
    found = figures(Played([good, late, refused, broken], 2.0, None), 2.0, 0.25)
    assert (found["requests"], found["finished"], found["refused"], found["errors"]) == (4, 2, 1, ["reset"])
    assert found["goodput"] == 0.25 and found["token_hit_rate"] == 0.125
    assert found["tbt_s"]["mean"] == pytest.approx(0.2) and found["longest_gap_s"]["p99"] == pytest.approx(0.3)
    assert found["first_gap_s"]["mean"] == pytest.approx(0.1) and found["ttft_s"]["mean"] == 2.0


def test_requests_that_failed_are_in_every_table_and_named():
    """They are in no latency: a case with some has those of the others."""
    good = Outcome(ttft_s=1.0, itl_s=[0.1], e2e_s=1.1, prompt_tokens=100, output_tokens=2, error=None)
    outcomes = [good, Outcome(error="status 429: full"), Outcome(error="not finished before the deadline"), good]
    found = figures(Played(outcomes, 2.0, None), 2.0, 0.25)
    assert found["failed"] == 0.25 and figures(Played([good], 2.0, None), 2.0, 0.25)["failed"] == 0
    for one in LIVE.values():
        assert one.name == "overload" or one.metrics["failed"](found) == 0.25
    own = overload.OVERLOAD
    assert "failed otherwise" in LIVE["overload"].metrics and LIVE["overload"].reading is own.reading
    one = at_urls(LIVE["shifts"], [("a", "http://x"), ("b", "http://y")])
    values = {"a": {"failed": Estimated(0.01, 0.1)}, "b": {"failed": Estimated(0.0, 0.0)}}
    assert one.reading(values).endswith('Some requests failed, and their times are in no latency: "a".')
    assert "failed" not in one.reading({"b": values["b"]})


def test_costs_of_a_run_are_those_of_all_its_nodes_over_the_good_tokens():
    good = Outcome(ttft_s=0.5, itl_s=[0.1], e2e_s=0.6, prompt_tokens=90, output_tokens=2, error=None)
    late = replace(good, ttft_s=3.0)
    broken = replace(good, error="no route")
    prices, busy = {"a": 1.0, "b": 0.5}, {"a": 360.0, "b": 720.0}
    found = costs(Played([good, late, broken], 1800.0, None), prices, busy, 2.0, 0.25)
    assert found == {
        "node_hours": 1.0,
        "cost_per_million_tokens": pytest.approx(0.75e6 / 92),
        "busy_cost_per_million_tokens": pytest.approx(0.2e6 / 92),
    }
    nothing = costs(Played([late], 1800.0, None), prices, busy, 2.0, 0.25)
    assert nothing["cost_per_million_tokens"] is nothing["busy_cost_per_million_tokens"] is None
    assert all(set(COSTS) <= set(one.metrics) for one in LIVE.values())


@pytest.mark.parametrize("name", LOADS)
def test_adversarial_loads_are_small_enough_for_nodes_of_this_machine_and_whole(name):
    seconds = 40.0
    made = generated(name, 3, seconds)
    assert made == generated(name, 3, seconds) != generated(name, 4, seconds)
    assert 0.5 * RATE_S * seconds <= len(made) <= RATE_S * seconds
    assert all(0 <= spec.at_s < seconds and 0 < len(spec.token_ids) <= 3000 for spec in made)
    heads = [tuple(spec.token_ids[:LIVE_BLOCK]) for spec in made]
    before, after = heads[: len(heads) // 2], heads[len(heads) // 2 + 1 :]
    popular = max(after.count(head) for head in after) / len(after)
    if name == "viral":
        assert popular > 0.6 and max(before.count(head) for head in before) == 1
    if name == "flip":
        assert len(set(before)) < len(before) and not set(before) & set(after)


def test_the_simulated_twin_of_nodes():
    config = twin("prefill=2,decode=1,store=1", NODE, 6400)
    assert (config.prefill, config.decode, config.mixed, config.block_tokens, config.kv_blocks) == (2, 1, 0, 16, 400)
    assert (config.batching_policy, config.step_prompts, config.tbt_budget_s) == ("dynamic", 64, 0.1)
    assert twin("prefill+decode=2", NODE, 6400).mixed == twin("mixed=2", NODE, 6400).mixed == 2
    model = base_model("mine", NODE, 6400)
    assert (model.token_bytes, model.chunk_tokens, model.max_batch) == (23040, 1024, 64)
    found, cluster = simulate(config, model, requests(Shape(rate=4.0), 0, 10.0))
    assert [one.arena.left for one in cluster.nodes] == [6400] * 3, "one memory, as the nodes have it"
    assert found["finished"] == found["requests"] > 20 and found["token_hit_rate"] > 0.05


def test_the_twin_of_a_store_has_as_many_blocks_in_its_tiers():
    tiers = {"dram": {"capacity": 40}, "ssd": {"capacity": 300}}
    config = twin("prefill=1,decode=1,store=1", NODE, 6400, tiers=tiers)
    assert (config.store, config.pool_blocks, config.ssd_blocks) == (1, 40, 300)
    assert twin("prefill=1,decode=1,store=1", NODE, 6400, tiers={"dram": {"capacity": 40}}).ssd_blocks == 0
    assert twin("prefill=1,decode=1,store=1", NODE, 6400).store == 0, "nothing is known of it"


def test_rows_have_the_blocks_of_nodes():
    rows = [TraceRow(0.0, 70, 3, [5, 9]), TraceRow(1.0, 64, 3, [5])]
    first, second = in_blocks(rows, 16)
    assert first.hash_ids == [20, 21, 22, 23, 36] and second.hash_ids == first.hash_ids[:4]
    assert in_blocks(rows, LIVE_BLOCK) == rows
    with pytest.raises(ValueError, match="48 tokens"):
        in_blocks(rows, 48)


def fetched(nbytes: int, seconds: float, **tiers: int) -> dict[str, Any]:
    return {"bytes": nbytes, "seconds": seconds, "tiers": tiers}


def test_fetches_by_tier_and_their_rates():
    found = summed([fetched(400, 2.0, dram=4), fetched(200, 4.0, ssd=2), fetched(300, 9.0, dram=1, ssd=2)], 16)
    assert (found.fetches, found.dram_tokens, found.ssd_tokens) == (3, 80, 64)
    assert (found.dram_bytes_s, found.ssd_bytes_s) == (200.0, 50.0), "a fetch from both tells neither"
    arena, far = fetched(900, 1.0, arena=9), fetched(900, 9.0, dram=9) | {"site": "east"}
    alone = summed([fetched(400, 2.0, dram=4)], 16)
    assert summed([fetched(400, 2.0, dram=4), arena], 16) == alone
    assert summed([fetched(400, 2.0, dram=4), far], 16) == alone, "over a link, not the pool"
    assert summed([], 16) == Fetches(0, 0, 0, 0.0, 0.0) and summed([], 16).told(EMBEDDED_CPU) == EMBEDDED_CPU


def test_a_fetch_takes_a_while_of_its_own_and_the_rates_are_those_of_all_fetches():
    """8 ms, 1 GB/s, and 0.5 GB/s more of what is on SSD: small fetches from DRAM alone would tell a rate of 0.1."""
    made = []
    for number, (dram, ssd) in enumerate([(1, 0), (2, 0), (0, 20), (5, 15), (30, 10), (0, 40), (3, 9), (12, 0)]):
        seconds = 8e-3 + (dram + ssd) * 1e-3 + ssd * 2e-3
        made.append(fetched((dram + ssd) * 10**6, seconds * (1.02 if number % 2 else 0.98), dram=dram, ssd=ssd))
    found = summed(made, 16)
    model = found.told(EMBEDDED_CPU)
    assert model.nic_latency_s == pytest.approx(8e-3, rel=0.1)
    assert (model.nic_bytes_s, model.ssd_bytes_s) == pytest.approx((1e9, 0.5e9), rel=0.1)
    of_dram = [fetched(count * 10**6, 8e-3 + count * 1e-3, dram=count) for count in (1, 5, 20, 40)]
    no_ssd = summed(of_dram, 16).told(EMBEDDED_CPU)
    assert no_ssd.ssd_bytes_s == EMBEDDED_CPU.ssd_bytes_s and no_ssd.nic_bytes_s == pytest.approx(1e9, rel=0.1)


def test_requests_go_to_their_doors_and_outcomes_keep_their_order(monkeypatch):
    class Door:
        def __init__(self, url: str) -> None:
            self.url, self.server = url, SimpleNamespace(config=None)

        async def run(self, specs, max_concurrency, deadline_s, on_done):
            return [Outcome(request_id=f"{self.url}{spec.output_len}") for spec in specs], 1.0

    async def door(session, name, url):
        return Door(url)

    monkeypatch.setattr(live_play, "greedy_client", door)
    wanted = [Spec([1], number) for number in range(4)]

    def asked(places: list[int] | None) -> list[str]:
        return [one.request_id for one in live_play.play(["a", "b"], wanted, places=places).outcomes]

    assert asked(None) == ["a0", "b1", "a2", "b3"]
    assert asked([1, 1, 0, 1]) == ["b0", "b1", "a2", "b3"]


def test_who_had_the_cores():
    watch = Watch({"me": os.getpid()})
    until = time.process_time() + 0.15
    while time.process_time() < until:
        pass
    shares = watch.end()
    assert shares.elsewhere >= 0
    assert 0 < shares.client <= 1.5 and 0 < shares.loops["me"] + shares.others["me"] <= 2 * os.cpu_count()


def test_every_ablation_is_live_or_says_why_not(capsys):
    for name in ABLATIONS.keys() - LIVE.keys():
        assert name in why_not(name)
        with pytest.raises(SystemExit):
            ablate.main([name, "--live"])
    assert "simulator only" in capsys.readouterr().err
    assert DEFAULT_REASON in why_not("nonsense")


@pytest.mark.parametrize("wrong", [["overlap", "--url", "a=http://x"], ["overlap", "--live", "--url", "nonsense"]])
def test_urls_are_for_live_ablations(wrong, capsys):
    with pytest.raises(SystemExit):
        ablate.main(wrong)
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize("name", LIVE)
def test_cases_have_names_of_their_own_and_requests(name, monkeypatch):
    monkeypatch.setattr(overload, "capacity", lambda: 2.0)
    one = LIVE[name]
    cases = one.cases(None)
    assert len({case.label for case in cases}) == len(cases) >= 3
    values = {case.label: dict.fromkeys(one.metrics, ESTIMATE) for case in cases}
    elsewhere = at_urls(one, [("a", "http://x"), ("b", "http://y")])
    assert len(one.reading(values)) > 40 and "their own configuration" in elsewhere.reading({"a": {}})
    loads = {case.workload.name: case.workload for case in cases}
    assert all(load.specs(0, 8.0) == load.specs(0, 8.0) != load.specs(1, 8.0) for load in loads.values())
    assert len(elsewhere.cases(None)) == 2 * len(loads)
    if len(loads) == 1:
        named = at_urls(one, [(case.label, "http://x") for case in cases])
        assert named.reading(values) == one.reading(values), "clusters with the labels of its own cases"


def test_an_ablation_of_running_clusters(url, tmp_path, capsys, monkeypatch):
    quick = of_shape("quick", Shape(prompt=(20.0, 0.2), answer=(4.0, 0.2), rate=20.0))
    monkeypatch.setitem(LIVE, "colocated", replace(LIVE["colocated"], cases=lambda _: [LiveCase("here", quick)]))
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    wanted = ["--live", "--url", f"one={url}", "--url", f"two={url}", "--seconds", "0.4", "--seeds", "2"]
    assert ablate.main(["colocated", *wanted, "--json", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "| one |" in shown and "| two |" in shown and "with their own configuration" in shown
    told = orjson.loads(out.read_bytes())
    assert {row["case"] for row in told["rows"]} == {"one", "two"}
    assert all(len(one["seeds"]) == 2 and one["node"] == {"fake": True} for one in told["config"]["cases"].values())
    assert plot.read_text().startswith("<?xml")
    assert ablate.main(["colocated", "--live", "--url", "gone=http://127.0.0.1:9", "--seeds", "1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_capacity_search_on_a_running_cluster(url, tmp_path, capsys, monkeypatch):
    seeds = []

    def edge_at_three(urls, shape, rate, seconds, seed, wanted):
        seeds.append(seed)
        return Tried(rate, rate <= 3, {"ttft_s": rate, "tbt_s": 0.01, "refused": 0.0})

    monkeypatch.setattr(capacity, "try_rate", edge_at_three)
    out = tmp_path / "out.json"
    assert capacity.main(["--live", "--url", url, "--seed", "5", "--json", str(out)]) == 0
    row = orjson.loads(out.read_bytes())["rows"][0]
    assert 2.7 <= row["ours"] <= 3.0 and seeds == list(range(5, 5 + len(seeds)))
    assert "requests/s" in capsys.readouterr().out
    assert capacity.main(["--url", url]) == 2
    assert "--live" in capsys.readouterr().err


def test_a_try_of_a_search(url):
    shape = Shape(prompt=(20.0, 0.2), answer=(4.0, 0.2))
    easy, hopeless = (try_rate([url], shape, 8.0, 1.0, 0, Objectives(t, 1.0, 0.9)) for t in (5.0, 1e-6))
    assert easy.good and not hopeless.good and easy.values["refused"] == 0 and easy.values["requests"] > 2

"""scripts/bench_transfer.py: real contenders on tiny arenas, and the judgement of its goals."""

import json

import bench_transfer
from transferbench.agent import plan
from transferbench.pairs import Arenas
from transferbench.verdict import verdicts

KIB, MIB = 1 << 10, 1 << 20


def test_a_plan_visits_no_block_twice_and_joins_none():
    calls = plan(64 * KIB, 4, 4 * MIB)
    here = [offset for ours, _ in calls for offset in ours]
    there = [offset for _, theirs in calls for offset in theirs]
    assert len(calls) == 16
    assert sorted(here) == sorted(there) == list(range(0, 4 * MIB, 64 * KIB))
    assert here != there


def test_blocks_that_did_not_arrive_are_seen():
    arenas = Arenas(MIB)
    calls = {"first": ([0], [64 * KIB]), "last": ([128 * KIB], [0])}
    arenas.begin("read", 64 * KIB)
    assert arenas.wrong(calls, 64 * KIB) == 2
    local, remote = arenas._bytes["local"], arenas._bytes["remote"]
    local[: 64 * KIB] = remote[64 * KIB : 128 * KIB]
    assert arenas.wrong(calls, 64 * KIB) == 1


def test_goals_are_judged_by_ratios_of_one_run():
    cell = {"gbs": 9.0, "p50_us": 10.0, "p99_us": 31.0}
    cells = {("ours-shm", "read", 368 * KIB, 1): cell, ("memcpy", "read", 368 * KIB, 1): cell | {"gbs": 10.1}}
    rows = verdicts(cells)
    assert [(row["met"], round(row["ratio"], 2)) for row in rows] == [(False, 0.89), (False, 3.1)]


def test_one_run_of_ours_beside_the_limits_with_the_peers_missing(tmp_path, capsys):
    out = tmp_path / "cells.jsonl"
    arguments = ["--quick", "--seconds", "0.01", "--sizes", "64K", "--batches", "1,4", "--arena-mb", "8"]
    arguments += ["--only", "memcpy,sockets,stream,ours-shm,ours-tcp,nixl", "--json", str(out)]
    assert bench_transfer.main(arguments) == 0
    text = capsys.readouterr().out
    assert "missing: nixl: name an interpreter that has it with --peer-python" in text
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert set(head["missing"]) == {"nixl"}
    cells = [row for row in rows if "gbs" in row]
    assert len(cells) == 5 * 2 * 2
    wanted = {"peer", "op", "size", "batch", "threads", "n", "gbs", "p50_us", "p99_us", "cpu_s_per_gb"}
    assert all(wanted <= set(row) and row["n"] > 0 and row["gbs"] > 0 for row in cells)
    assert any("max_ms" in row for row in rows)

"""scripts/bench.py attention --device cpu: a small real run, its result file and its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attention.cpu.level import levels_here

SCRIPT = [str(Path(__file__).resolve().parents[4] / "scripts" / "bench.py"), "attention"]


@pytest.mark.skipif(not levels_here(), reason="the cpu backend needs x86 with AVX2, or aarch64")
def test_measures_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    level = levels_here()[-1]
    command = [sys.executable, *SCRIPT, "--device", "cpu", "--threads", "1", "--quick", "--json", str(path)]
    done = subprocess.run([*command, "--cpu-level", level], capture_output=True, text=True, timeout=240)
    assert done.returncode == ("slower than torch: " in done.stdout), done.stderr
    result = json.loads(path.read_text())
    assert result["config"]["device"].startswith("cpu with ")
    times = [row for row in result["rows"] if row["metric"] == "time"]
    rates = [row for row in result["rows"] if row["metric"] == "rate"]
    assert len(times) == len(rates) == 12
    assert {row["case"].split(", ")[1] for row in rates} == {"float32", "bfloat16", "int8"}
    assert all(row["case"].startswith(f"{level}, ") for row in result["rows"])
    assert all(row["ours"] > 0 and row["peers"]["torch"] > 0 for row in times)
    assert {name for row in rates for name in row["limits"]} == {"read", "blocks", "GEMM"}
    shares = {(row["case"], row["metric"]): row for row in result["rows"] if row["metric"].startswith("share of ")}
    for row in rates:
        for name, limit in row["limits"].items():
            share = shares.pop((row["case"], f"share of {name}"))
            assert share["ours"] == pytest.approx(row["ours"] / limit)
            assert share["limits"] == ({} if name == "blocks" else {"goal": 0.6 if name == "GEMM" else 0.7})
    assert shares == {}
    assert f"share of read (goal 0.7): {level}, int8, 1 threads: " in done.stdout
    assert f"share of blocks: {level}, int8, 1 threads: " in done.stdout
    refused = subprocess.run([*command, "--cpu-level", "sparc"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--cpu-level sparc: this CPU has " in refused.stderr


def test_a_slower_case_is_named() -> None:
    from lab.bench.attention.on_cpu import slower_than_torch
    from lab.bench.common.results import Row

    rows = [Row("a", "time", "us", 2.0, {"torch": 1.0}), Row("b", "time", "us", 1.0, {"torch": 1.0})]
    assert slower_than_torch([*rows, Row("c", "rate", "GB/s", 1.0)]) == ["a"]


def test_shares_are_by_limit_level_type_and_threads() -> None:
    from lab.bench.attention.on_cpu import shares
    from lab.bench.common.results import Row

    rows = [
        Row("avx2, int8, decode x1, 1 threads", "rate", "GB/s", 5.0, limits={"read": 10.0}),
        Row("avx2, int8, decode x1, 1 threads", "time", "us", 5.0, {"torch": 9.0}),
        Row("avx2, int8, decode x8, 1 threads", "rate", "GB/s", 8.0, limits={"read": 10.0}),
        Row("avx2, int8, decode x8, 2 threads", "rate", "GB/s", 9.0, limits={"read": 20.0}),
        Row("avx2, int8, prefill x8, 1 threads", "rate", "GFLOP/s", 9.0, limits={"GEMM": 20.0}),
    ]
    assert shares(rows) == [
        "share of GEMM (goal 0.6): avx2, int8, 1 threads: 0.45 to 0.45",
        "share of read (goal 0.7): avx2, int8, 1 threads: 0.50 to 0.80",
        "share of read (goal 0.7): avx2, int8, 2 threads: 0.45 to 0.45",
    ]

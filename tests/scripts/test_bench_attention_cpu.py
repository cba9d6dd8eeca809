"""scripts/bench_attention.py --device cpu: a small real run, its result file and its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attention.cpu_level import levels_here

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_attention.py"


@pytest.mark.skipif(not levels_here(), reason="the cpu backend needs x86 with AVX2, or aarch64")
def test_measures_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--threads", "1", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["config"]["device"].startswith("cpu, kernels of level ")
    times = [row for row in result["rows"] if row["metric"] == "time"]
    rates = [row for row in result["rows"] if row["metric"] == "rate"]
    assert len(times) == len(rates) == 4
    assert all(row["ours"] > 0 and row["peers"]["torch"] > 0 for row in times)
    assert {name for row in rates for name in row["limits"]} == {"read", "GEMM"}

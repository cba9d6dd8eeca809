"""scripts/bench.py attention: what it counts, and the run that needs no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = [str(ROOT / "scripts" / "bench.py"), "attention"]


def test_compiles_and_reports_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "out" / "attention.json"
    command = [sys.executable, *SCRIPT, "--aot", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert {"config", "commit", "rows"} <= set(result) and result["config"]["capability"] == 90
    spilled = [row["ours"] for row in result["rows"] if row["metric"] == "spills"]
    assert spilled and not any(spilled)
    assert "prefill_kernel" in done.stdout and "short_kernel" in done.stdout
    turns = [row for row in result["rows"] if row["metric"] == "a turn, by the model"]
    assert turns and all(row["ours"] >= max(row["limits"].values()) > 0 for row in turns)


def test_every_tile_is_for_compiling(capsys: pytest.CaptureFixture[str]) -> None:
    from lab.bench.attention.command import parse

    with pytest.raises(SystemExit):
        parse(["--every-tile"])
    assert "--every-tile needs --aot" in capsys.readouterr().err


def test_counts_every_visible_pair() -> None:
    from lab.bench.attention.cases import Case, Shape, batch_of

    case = Case(Shape("tiny", 4, 2, 8), requests=3, context=10, chunk=4)
    pairs = sum(7 + row for row in range(4))
    assert case.operations == 3 * 4 * pairs * 2 * 8 * 2
    assert case.bytes_moved == 3 * (10 * 2 * 2 * 8 + 4 * 2 * 4 * 8) * 2
    batch, num_blocks = batch_of(case, 4, "cpu")
    assert num_blocks == 9 and batch.block_tables.unique().numel() == 9
    assert (batch.slot_mapping[:4] // 4).tolist() == [int(batch.block_tables[0, p // 4]) for p in range(6, 10)]

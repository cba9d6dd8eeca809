"""scripts/bench.py tune-attention without a GPU: it compiles candidates, rejects bad ones, and rewrites its row
only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="scripts/setup --test installs triton")

from attention.triton.tiles import SM90, TABLE, Tile, Tiles
from lab.bench.attention.tuning import Target, candidates, compile_one, row_of, with_row

ROOT = Path(__file__).resolve().parents[4]
TARGET = Target(128, torch.bfloat16, 90)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_the_shipped_tile_is_the_first_candidate_and_fits():
    for kind in ("decode", "prefill", "long"):
        tiles = candidates(kind, TARGET)
        assert tiles[0] == getattr(TABLE[128, 2, SM90], kind) and len(tiles) == len(set(tiles)) > 7
    for kind in ("decode", "long"):
        compiled = compile_one(kind, TARGET, candidates(kind, TARGET)[0])
        assert compiled.problem == "" and compiled.registers > 0 and compiled.shared_bytes > 0


@pytest.mark.parametrize(
    ("tile", "problem"),
    [
        (Tile(128, 64, 4, 2), "spills"),
        (Tile(128, 128, 8, 5), "shared memory"),
        (Tile(128, 8, 8, 2), "does not compile"),
    ],
    ids=str,
)
def test_candidates_that_do_not_fit_are_named(tile, problem):
    assert problem in compile_one("prefill", TARGET, tile).problem


def test_the_row_is_replaced_and_no_other():
    source = (ROOT / "attention" / "triton" / "tiles.py").read_text()
    assert with_row(source, TARGET, row_of(TARGET, TARGET.current)) == source, "row_of writes as the file is written"
    plain = Target(256, torch.float32, 86)
    assert with_row(source, plain, row_of(plain, plain.current)) == source
    new = row_of(TARGET, Tiles(Tile(64, 32, 8, 2, min_chunk=512), Tile(64, 64, 4, 3)))
    assert new == "    (128, 2, SM90): Tiles(Tile(64, 32, 8, 2, min_chunk=512), Tile(64, 64, 4, 3)),"
    before, after = source.splitlines(), with_row(source, TARGET, new).splitlines()
    assert [line for line in after if line not in before] == [new] and len(after) == len(before)
    ampere = Target(128, torch.bfloat16, 80)  # has a row for quantized pools, too
    new = row_of(ampere, Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)))
    assert sum(a != b for a, b in zip(before, with_row(source, ampere, new).splitlines(), strict=True)) == 1
    extra = Target(64, torch.float32, 90)
    added = with_row(source, extra, row_of(extra, extra.current)).splitlines()
    assert len(added) == len(before) + 1


def test_a_dry_run_needs_no_gpu(tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts" / "bench.py",
        "tune-attention",
        "--head-size",
        "64",
        "--dry-run",
        "--kind",
        "decode",
    ]
    out = tmp_path / "tune.json"
    command += ["--limit", "2", "--jobs", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("written: ", "note: "))]
    assert len(lines) == 3 and "registers" in lines[0]
    assert lines[-1].startswith("    (64, 2, SM90): Tiles(Tile(64, 128, 4, 4),")
    result = json.loads(out.read_text())
    assert [(row["metric"], row["unit"]) for row in result["rows"]] == [("registers", "per thread")] * 2
    assert result["rows"][0]["ours"] > 0 and result["config"]["row"] == lines[-1].strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_names_the_way_out():
    command = [sys.executable, ROOT / "scripts" / "bench.py", "tune-attention", "--head-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--dry-run" in done.stderr

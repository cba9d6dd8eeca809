"""Rows of products, with their limits and goals, at levels in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from attention.cpu.level import levels_here
from engine.model.ops.quantized import BLOCKS
from lab.bench.common.results import Row
from lab.bench.ops import command, products, quantized
from lab.bench.ops.limits import environment, in_process, multiplied
from lab.bench.ops.one_level import rows_at
from lab.bench.ops.products import goal_rows, product_rows, slower_than_torch
from lab.bench.ops.quantized import ITEM_BYTES, quantized_rows, random_weight


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_each_kind_with_the_widened_weight_and_the_floor(monkeypatch):
    shapes = {"gate_up": (64, 96), "down": (64, 256)}
    for name, value in {"SHAPES": shapes, "VOCAB": 320, "HIDDEN": 96, "ROTATE_BYTES": 100_000}.items():
        monkeypatch.setattr(quantized, name, value)
    monkeypatch.setattr(quantized, "read_rate", lambda threads: 10.0)
    rows = quantized_rows([1, 64], 1, levels_here()[-1], torch.float32)
    where = f"{levels_here()[-1]}, float32, 1 threads"
    small = ("q8_0", "q4_0", "q4_1", "mxfp4", "int8", "fp8")  # whose blocks fit 96 inputs
    assert [row.case for row in rows] == [
        *(f"gate_up {kind}, {m} rows, {where}" for kind in small for m in (1, 64)),
        *(f"down {kind}, {m} rows, {where}" for kind in (*BLOCKS, "int8", "fp8") for m in (1, 64)),
        *(f"head {kind}, 1 rows, {where}" for kind in small),
    ]
    assert all(row.ours > 0 and row.peers["widened"] > 0 for row in rows)
    floors = {row.case.split(",")[0]: row.limits["read"] for row in rows}
    assert floors["gate_up q4_1"] == pytest.approx(64 * 96 * 20 / 32 / 10e9 * 1e6)
    assert floors["down q6_k"] == pytest.approx(64 * 210 / 10e9 * 1e6)
    assert floors["down fp8"] == pytest.approx(64 * 256 / 10e9 * 1e6)
    assert floors["head q8_0"] == pytest.approx(320 * 96 * 34 / 32 / 10e9 * 1e6)


def test_random_weights_are_finite():
    torch.manual_seed(0)
    for kind in ITEM_BYTES:
        assert random_weight(kind, (50, 512), torch.float32).widened().isfinite().all()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a tiny layer. The second measurement of the limits finds a higher rate."""
    shapes = {"gate_up": (64, 96), "down": (64, 256)}
    for name, value in {"SHAPES": shapes, "VOCAB": 320, "HIDDEN": 96, "INNER": 32, "ROTATE_BYTES": 100_000}.items():
        monkeypatch.setattr(products, name, value)
    monkeypatch.setattr(products, "SECONDS", 0.001)
    found = iter([{"read": 1e9, "GEMM": 1e9}, {"read": 1e8, "GEMM": 3e9}])
    monkeypatch.setattr(products, "limits", lambda threads, level, dtype: next(found))


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_each_product_with_torchs_and_the_best_limit_of_the_run(small):
    level = levels_here()[-1]
    where = f"{level}, float32, 1 threads"
    limits, rows = {}, []
    for row in product_rows([1, 64], 1, level, torch.float32):
        if row.case.startswith("limit, "):
            limits[row.metric] = row.ours
        else:
            rows.append(row)
    assert limits == {"read": 1e9, "GEMM": 3e9}
    assert [row.case for row in rows] == [
        *(f"{name}, {m} rows, {where}" for name in ("gate_up", "down") for m in (1, 64)),
        f"head, 1 rows, {where}",
    ]
    assert [row.limits for row in rows] == [{"read": 1e9}, {"GEMM": 3e9}] * 2 + [{"read": 1e9}]
    assert all(row.metric == "rate" and row.ours > 0 and row.peers["F.linear"] > 0 for row in rows)


def rate(case: str, ours: float, torchs: float) -> Row:
    return Row(case, "rate", "GB/s", ours, {"F.linear": torchs, "oneDNN packed": 99.0}, {"read": 100.0})


def test_goals_are_of_each_level_type_and_number_of_rows():
    """The slowest product decides, and the noise does not."""
    rows = goal_rows(
        [
            Row("limit, avx2, float32, 1 threads", "read", "GB/s", 40.0),
            rate("qkv, 8 rows, avx2, float32, 1 threads", 10, 5),
            rate("o, 8 rows, avx2, float32, 1 threads", 10, 15),
            rate("qkv, 32 rows, avx2, float32, 1 threads", 10, 10.5),
            rate("qkv, 8 rows, avx2, bfloat16, 1 threads", 10, 5),
            Row("qkv q4_0, 8 rows, avx2, bfloat16, 1 threads", "time", "us", 3.0, {"widened": 9.0}),
        ]
    )
    assert [(row.case, row.ours, row.limits) for row in rows] == [
        ("slowest product, 8 rows, avx2, float32, 1 threads", 1.5, {"goal": 1.0}),
        ("slowest product, 32 rows, avx2, float32, 1 threads", 1.05, {"goal": 1.0}),
        ("slowest product, 8 rows, avx2, bfloat16, 1 threads", 0.5, {"goal": 1.0}),
    ]
    assert slower_than_torch(rows) == ["slowest product, 8 rows, avx2, float32, 1 threads"]


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@pytest.mark.parametrize("torchs", [5.0, 20.0])
def test_the_command_measures_every_level_and_its_status_says_whether_one_is_slower(
    monkeypatch, capsys, tmp_path, torchs
):
    asked = []

    def rows_at(level, part, counts, threads, dtype):
        asked.append((level, part, tuple(counts), threads, dtype))
        return [rate(f"qkv, 8 rows, {level}, {dtype}, {threads} threads", 10, torchs)]

    monkeypatch.setattr(command, "rows_at", rows_at)
    arguments = ["--only", "products", "--threads", "1", "--json", str(tmp_path / "ops.json")]
    assert command.main([*arguments, "--cpu-level", "all"]) == (torchs > 10)
    counts = (1, 8, 32, 128, 512, 2048)
    assert asked == [
        (level, "products", counts, 1, dtype) for level in levels_here() for dtype in ("float32", "bfloat16")
    ]
    slower = [f"slowest product, 8 rows, {one}, {dtype}, 1 threads" for one, _, _, _, dtype in asked]
    printed = capsys.readouterr().out
    assert [f"slower than torch: {case}" in printed for case in slower] == [torchs > 10] * len(slower)
    written = json.loads((tmp_path / "ops.json").read_text())
    assert written["config"]["cpu_level"] == levels_here()
    assert [row["case"] for row in written["rows"] if row["metric"] == "time / F.linear's"] == slower
    with pytest.raises(SystemExit):
        command.main(["--cpu-level", "sparc"])
    assert "this CPU has" in capsys.readouterr().err


@pytest.mark.skipif("avx2" not in levels_here()[1:], reason="this CPU has no level above avx2")
def test_torch_has_the_instructions_of_the_level():
    """By torch's own report."""
    assert environment(levels_here()[0]) == {} and environment("neon") == {}
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    told = subprocess.run([sys.executable, "-c", code], env=environment("avx2"), capture_output=True, text=True)
    assert told.stdout.strip() == "AVX2"
    assert environment("avx2")["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    with pytest.raises(RuntimeError, match=r"lab.bench.ops.nothing at level avx2 failed:(.|\n)*No module named"):
        in_process("lab.bench.ops.nothing", "avx2")


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_a_real_level_in_its_process():
    level = levels_here()[-1]
    rows = rows_at(level, "products", [1], 1, "float32")
    assert [row.case.split(",")[0] for row in rows] == ["limit", "limit", "qkv", "o", "gate_up", "down", "head"]
    assert all(f"{level}, float32, 1 threads" in row.case and row.ours > 0 for row in rows)
    assert goal_rows(rows)[0].case == f"slowest product, 1 rows, {level}, float32, 1 threads"


def test_levels_without_products_of_bfloat16_are_compared_with_float32():
    assert multiplied("avx2", torch.bfloat16) == torch.float32 == multiplied("amx", torch.float32)
    assert multiplied("avx512_bf16", torch.bfloat16) == torch.bfloat16

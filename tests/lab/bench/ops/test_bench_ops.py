"""Rows of quantized products."""

from __future__ import annotations

import pytest
import torch

from attention.cpu.level import levels_here
from engine.model.ops.quantized import BLOCKS
from lab.bench.ops import quantized
from lab.bench.ops.quantized import ITEM_BYTES, quantized_rows, random_weight


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_each_kind_with_the_widened_weight_and_the_floor(monkeypatch):
    shapes = {"gate_up": (64, 96), "down": (64, 256)}
    for name, value in {"SHAPES": shapes, "VOCAB": 320, "HIDDEN": 96, "ROTATE_BYTES": 100_000}.items():
        monkeypatch.setattr(quantized, name, value)
    monkeypatch.setattr(quantized, "limits", lambda threads, level, dtype: {"read": 10.0})
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

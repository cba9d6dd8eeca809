"""The cost model of kernels: what it counts in machine code, and what it says of the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

from attention.triton import aot
from attention.triton.tiles import SM90, find_tiles
from lab.bench.attention.cases import LLAMA_8B, Case
from lab.bench.attention.compiled import launches_of, programs_row
from lab.bench.attention.cost import GPUS, Turn, resident_programs, turn_of
from lab.bench.attention.every_tile import BLOCKS, LLAMA, attention_launches
from lab.bench.attention.sass import Loop, parsed

CODE = """
.L_x_1:
        /*0000*/              @P0 SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR8], R155 ;
        /*0010*/              @!P2 BRA `(.L_x_3) ;
.L_x_4:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/                   MUFU.EX2 R1, R2 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0060*/              @!P2 BRA `(.L_x_1) ;
.L_x_5:
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0080*/               @P1 BRA `(.L_x_5) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/               @P1 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_4) ;
"""
"""A loop with a wait that is kept out of it, a loop of Ampere's products, and a loop without products."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_loops_with_products_are_counted() -> None:
    assert list(parsed(CODE)) == [
        Loop(instructions=7, products=1, operations=2 * 64 * 128 * 16 // 4, special=1, waits=1, barriers=1),
        Loop(instructions=2, products=1, operations=2 * 16 * 8 * 16, special=0, waits=0, barriers=0),
    ]


def test_what_may_overlap() -> None:
    loop = Loop(1, 1, 1, 1, 1, 1)
    alone = Turn(1000.0, 700.0, 500.0, 800.0, resident=1, groups=1, loop=loop)
    assert alone.cycles == 1700.0, "the softmax waits for the products, and the products for the softmax"
    assert Turn(1000.0, 700.0, 500.0, 800.0, 1, 2, loop).cycles == 1000.0
    assert Turn(1000.0, 700.0, 500.0, 2800.0, 1, 1, loop).cycles == 2800.0


def test_what_limits_the_programs_of_a_multiprocessor() -> None:
    def used(registers: int, shared: int, threads: int) -> aot.Resources:
        return aot.Resources(registers, 0, shared, 0, 0, 0, 0, 0, threads=threads)

    gpu = GPUS[90]
    assert resident_programs(used(255, 1024, 128), gpu) == 2, "registers"
    assert resident_programs(used(32, 100 * 1024, 128), gpu) == 2, "shared memory"
    assert resident_programs(used(16, 0, 1024), gpu) == 2, "threads"
    assert resident_programs(used(168, 180_000, 384), gpu) == 1


def test_the_model_of_the_shipped_kernels() -> None:
    """The operations that it counts in the machine code are those of the tile. Where every warp waits for the products
    of all, the products have half of the time; two groups of warps leave them nearly all."""
    tiles = find_tiles(128, 2, SM90)
    assert tiles.long is not None
    gathered = turn_of(attention_launches(128, torch.bfloat16, tiles, LLAMA)["prefill_kernel"], 90)
    boxes = turn_of(attention_launches(128, torch.bfloat16, tiles, BLOCKS)["long_kernel"], 90)
    assert gathered is not None and boxes is not None
    assert gathered.products == 4 * tiles.prefill.rows * tiles.prefill.keys * 128 / GPUS[90].operations
    assert boxes.products == 4 * tiles.long.rows * tiles.long.keys * 128 / GPUS[90].operations
    assert gathered.groups == 1 and gathered.products / gathered.cycles < 0.65
    assert boxes.groups == 2 and boxes.products / boxes.cycles > 0.9
    assert boxes.loop.waits == 2, "one for the scores, one for the values: no wait behind a single wgmma"


def test_a_draft_fills_the_machine() -> None:
    case = Case(LLAMA_8B, 1, 32768, 5)
    (launch,) = (one for one in launches_of(case, 90, 16) if one.kernel.fn.__name__ == "short_kernel")
    row = programs_row("verify", 90, launch, case)
    assert row.limits == {"multiprocessors": 132.0, "without splits": 8.0}
    assert row.ours is not None and 2 * 132 <= row.ours < 3 * 132

"""Quantized pools: written, read by both kernels, and refused where their scales would not lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from attention.codes import DTYPES
from attention.reference import ReferenceBackend
from attention.triton.backend import TritonBackend
from attention.triton.codes import to_e4m3, to_int8
from attention.triton.tiles import Tile, Tiles
from attention.triton.write import write_kv
from lab.bench.attention.grid import MIXES, Point
from lab.bench.attention.quantized import find_quantized_fault, quantized, raw
from tests.attention.interpreted.cases import DEVICE


@pytest.mark.parametrize("kv_dtype", sorted(DTYPES))
def test_the_rule_of_the_grid_over_quantized_pools(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode of two splits, and a chunk; tiles of keys span two blocks, the first of which the window hides.
    Interpreted, a point takes seconds."""
    monkeypatch.setitem(MIXES, "small", [(1, 37), (6, 40)])
    tiles = Tiles(Tile(16, 32, 4, 2, min_chunk=32), Tile(32, 32, 4, 2))
    point = Point("small", 3, 1, 80, 16, torch.bfloat16)
    if kv_dtype == "int8":
        point = Point("small", 4, 2, 64, 16, torch.float32, window=20, soft_cap=5.0)
    assert find_quantized_fault(TritonBackend(tiles=tiles), point, kv_dtype, DEVICE) is None


@pytest.mark.parametrize("kv_dtype", sorted(DTYPES))
def test_codes_are_those_of_the_reference(kv_dtype: str) -> None:
    k, v = torch.randn(2, 5, 3, 80, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 3
    k[1, 2], v[3, 1, 5] = 0, torch.nan
    slots = torch.tensor([3, 17, -1, 40, 0], device=DEVICE)
    ours, theirs = (quantized(torch.full((3, 2, 3, 16, 80), torch.nan, device=DEVICE), kv_dtype) for _ in range(2))
    write_kv(k, v, ours, slots)
    batch = SimpleNamespace(slot_mapping=slots, block_size=16)
    ReferenceBackend().write_kv(k, v, theirs, batch, None)
    same = raw(ours) == raw(theirs)
    same[(len(same) // 84 * 80) :] = True  # scales of NaN may differ in their bits
    assert same.float().mean() > 0.99  # the row with NaN has any codes


@triton.jit
def coded_kernel(x: tl.tensor, e4m3: tl.tensor, int8: tl.tensor, COUNT: tl.constexpr, WIDTH: tl.constexpr) -> None:
    i = tl.arange(0, WIDTH)
    values = tl.load(x + i, mask=i < COUNT, other=0.0)
    tl.store(e4m3 + i, to_e4m3(values), mask=i < COUNT)
    tl.store(int8 + i, to_int8(tl.minimum(tl.maximum(values, -127.0), 127.0)), mask=i < COUNT)


def test_every_e4m3_value_and_midpoint_is_rounded_as_torch_does() -> None:
    """All 254 finite codes, what lies halfway between neighbours, and its neighbours in float32; the same in int8."""
    finite = torch.arange(256, dtype=torch.int16, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = finite[finite.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    halves = torch.arange(-254, 255, device=DEVICE) / 2
    far = torch.tensor(1e9, device=DEVICE)
    x = torch.cat((values, middle, middle.nextafter(far), middle.nextafter(-far), halves))
    e4m3 = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    int8 = torch.empty(len(x), dtype=torch.int8, device=DEVICE)
    coded_kernel[(1,)](x, e4m3, int8, COUNT=len(x), WIDTH=triton.next_power_of_2(len(x)))
    assert torch.equal(e4m3.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(int8, x.clamp(-127, 127).round().to(torch.int8))


def test_a_pool_without_room_for_scales_is_refused() -> None:
    k, v = torch.zeros(2, 1, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(k, v, torch.zeros(4, 2, 2, 16, 64, dtype=torch.int8, device=DEVICE), torch.tensor([1], device=DEVICE))

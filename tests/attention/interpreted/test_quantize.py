"""Blocks in one byte per element and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.quantize import LARGEST, dequantize_blocks, quantize_blocks
from tests.attention.interpreted.cases import DEVICE, DTYPES

FORMATS = tuple(LARGEST)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def numbers(*values: int) -> Tensor:
    """Of blocks."""
    return torch.tensor(values, device=DEVICE)


def make_pool(dtype: torch.dtype, block_size: int = 16, head_size: int = 64) -> Tensor:
    """Heads of very different size, as keys have them."""
    pool = torch.randn(6, 2, 2, 3, block_size, head_size, generator=torch.Generator().manual_seed(3))
    return (pool * torch.tensor([0.01, 1.0, 300.0])[:, None, None]).to(DEVICE, dtype)


def expected_codes(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of the same scales."""
    inverse = 1 / torch.where(scales == 0, 1.0, scales)
    scaled = (x.float() * inverse[..., None, None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_codes_and_scales_are_torchs(source: torch.dtype, dtype: torch.dtype) -> None:
    pool = make_pool(source)
    blocks, tokens = (
        numbers(4, 0, 5),
        int32(16, 16, 16),
    )
    payload, scales = quantize_blocks(pool, blocks, tokens, dtype)
    x = pool[blocks]
    torch.testing.assert_close(scales, x.float().abs().amax((-1, -2)) / LARGEST[dtype], rtol=1e-6, atol=0)
    assert torch.equal(payload.view(torch.uint8), expected_codes(x, scales, dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (48, 80), (64, 256)])
def test_round_trip_is_within_the_bound(block_size: int, head_size: int, dtype: torch.dtype) -> None:
    pool = make_pool(torch.float32, block_size, head_size)[:3]
    blocks, tokens = numbers(2, 0), torch.full((2,), block_size, dtype=torch.int32, device=DEVICE)
    payload, scales = quantize_blocks(pool, blocks, tokens, dtype)
    back = torch.full_like(pool, torch.nan)
    dequantize_blocks(payload, scales, back, numbers(1, 2))
    x, scale = pool[blocks], scales[..., None, None]
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, scale / 1024)
    assert ((back[1:] - x).abs() <= bound * (1 + 1e-5)).all()
    assert back[0].isnan().all(), "only the named blocks are written"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_unfilled_tokens_do_not_count(dtype: torch.dtype) -> None:
    pool = make_pool(torch.bfloat16)
    pool[1, :, :, :, 5:] = torch.nan
    payload, scales = quantize_blocks(pool, numbers(1, 1), int32(5, 0), dtype)
    assert scales[0].isfinite().all() and (scales[1] == 0).all()
    codes = payload.float()
    assert (codes[0, :, :, :, 5:] == 0).all() and (codes[1] == 0).all()
    dequantize_blocks(payload, scales, pool, numbers(0, 2))
    assert (pool[2] == 0).all()


def test_every_e4m3_value_and_midpoint() -> None:
    """All 254 finite codes, what lies halfway between neighbours, and its neighbours in float32: torch's rounding."""
    finite = torch.arange(256, dtype=torch.int16, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = finite[finite.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    up, down = middle.nextafter(torch.tensor(1e9, device=DEVICE)), middle.nextafter(torch.tensor(-1e9, device=DEVICE))
    x = torch.cat((values, middle, up, down))
    x = (
        torch.cat((x, torch.zeros(16 * 64 - len(x), device=DEVICE)))
        .view(1, 1, 1, 1, 16, 64)
        .expand(1, 1, 2, 1, 16, 64)
        .contiguous()
    )
    tokens = int32(16)
    payload, scales = quantize_blocks(x, numbers(0), tokens, torch.float8_e4m3fn)
    assert (scales == 1).all()
    assert torch.equal(payload.float(), x.to(torch.float8_e4m3fn).float())
    back = torch.empty_like(x)
    dequantize_blocks(payload, scales, back, numbers(0))
    assert torch.equal(back, payload.float())


def test_refuses_other_types_and_layouts() -> None:
    pool, tokens = make_pool(torch.float32), int32(16)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        quantize_blocks(pool, numbers(0), tokens, torch.float8_e5m2)
    with pytest.raises(ValueError, match="dense"):
        quantize_blocks(pool.transpose(4, 5), numbers(0), tokens, torch.int8)

"""Blocks in one byte per element on a CPU: within the bounds of the formats."""

import pytest
import torch

from attention.codes import LARGEST, e4m3_to_float
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry

FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def block_of(dtype=torch.bfloat16, layers=5, heads=3, size=16, head_size=64):
    """Heads of very different size, as keys have them."""
    x = torch.randn(layers, 2, heads, size, head_size, generator=torch.Generator().manual_seed(3))
    return (x * torch.tensor([0.01, 1.0, 300.0])[:heads, None, None]).to(dtype)


def encoded(block, dtype):
    layers, _, heads, size, head_size = block.shape
    geometry = BlockGeometry(layers, heads, head_size, size, "bfloat16", FORMATS[dtype])
    out = torch.full((geometry.pool_bytes,), 0xAA, dtype=torch.uint8)
    encode_block(block, dtype, out)
    return out


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("layers", "size", "head_size"), [(5, 16, 64), (1, 16, 256), (30, 4, 6), (2, 128, 128)])
def test_a_round_trip_is_within_the_bound(source, dtype, layers, size, head_size):
    block = block_of(source, layers, 3, size, head_size)
    back = torch.full(block.shape, torch.nan)
    decode_block(encoded(block, dtype), dtype, back)
    x = block.float()
    scale = x.abs().amax((-1, -2), keepdim=True) / LARGEST[dtype]
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, scale / 1024)
    assert ((back - x).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_latent_has_one_scale_for_each_layer(dtype):
    block = block_of(torch.float32, heads=2)[:, :1, 1:]  # one plane, one head
    geometry = BlockGeometry(5, 1, 64, 16, "float32", FORMATS[dtype], kind="latent")
    out, back = torch.empty(geometry.pool_bytes, dtype=torch.uint8), torch.full(block.shape, torch.nan)
    encode_block(block, dtype, out)
    decode_block(out, dtype, back)
    scale = block.abs().amax((-1, -2), keepdim=True) / LARGEST[dtype]
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(block.abs() / 16, scale / 1024)
    assert ((back - block).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_zeros_stay_zeros_and_the_largest_is_kept(dtype):
    block = torch.zeros(2, 2, 1, 4, 8)
    block[1, 0, 0, 2, 3] = -7.5
    back = torch.full_like(block, torch.nan)
    decode_block(encoded(block, dtype), dtype, back)
    torch.testing.assert_close(back, block, rtol=1e-6, atol=0)


def test_encoded_blocks_are_about_half_of_bfloat16():
    geometry = BlockGeometry(30, 3, 64, 16, "bfloat16", "int8")
    assert encoded(block_of(layers=30), torch.int8).numel() == geometry.pool_bytes
    assert 0.5 < geometry.pool_bytes / geometry.block_bytes < 0.51


def test_every_e4m3_code_but_nan_is_torchs_value():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    ours = e4m3_to_float(codes.view(torch.int8))
    assert torch.equal(ours[~values.isnan()], values[~values.isnan()])
    assert values.isnan().sum() == 2


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_codes_are_those_of_the_kernels_formula(dtype):
    block = block_of(torch.float32)
    scales = block.abs().amax((-1, -2)) / LARGEST[dtype]
    scaled = (block * (1 / scales)[..., None, None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    codes = (scaled.round() if dtype == torch.int8 else scaled).to(dtype).view(torch.uint8)
    rows = encoded(block, dtype).view(len(block), -1)
    assert torch.equal(rows[:, : codes[0].numel()], codes.flatten(1))

"""Blocks in four bits per element: every group within half a step, and keys by channel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.nibbles_torch import group_size
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry
from cache.block import group_size as size_in_cache

INT4 = torch.quint4x2


def there_and_back(block: torch.Tensor) -> torch.Tensor:
    layers, planes, heads, size, head_size = block.shape
    kind = "full" if planes == 2 else "latent"
    geometry = BlockGeometry(layers, heads, head_size, size, "bfloat16", "int4", kind=kind)
    encoded = torch.full((geometry.pool_bytes,), 0xAA, dtype=torch.uint8)
    back = torch.full(block.shape, torch.nan)
    encode_block(block, INT4, encoded)
    decode_block(encoded, INT4, back)
    return back


def bound(block: torch.Tensor) -> torch.Tensor:
    """Half a step, and the rounding of both bounds to float16."""
    x = block.float()
    out = torch.empty_like(x)
    for plane in range(x.shape[1]):
        axis = 2 if plane == 0 and x.shape[1] == 2 else 3  # of [layers, heads, tokens, channels]
        for part in x[:, plane].split(group_size(x.shape[axis + 1]), axis):
            least, most = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
            span = most - least
            wide = torch.maximum(torch.maximum(least.abs(), most.abs()), span)
            start = part.storage_offset()
            target = out.as_strided(part.shape, part.stride(), start)
            target[:] = (span / 30 + wide * 2**-9 + 2**-23).expand(part.shape)
    return out


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("layers", "planes", "heads", "size", "head_size"),
    [(5, 2, 3, 16, 64), (1, 2, 1, 16, 256), (30, 2, 3, 4, 6), (2, 2, 2, 128, 128), (3, 1, 1, 16, 576), (2, 2, 1, 1, 2)],
)
def test_a_round_trip_is_within_half_a_step(source, layers, planes, heads, size, head_size):
    x = torch.randn(layers, planes, heads, size, head_size, generator=torch.Generator().manual_seed(3))
    block = (x * torch.tensor([0.01, 1.0, 300.0])[:heads, None, None]).to(source)
    error = (there_and_back(block) - block.float()).abs()
    assert (error <= bound(block)).all()


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_shifted_values_too(seed, scale, shift):
    x = torch.randn(2, 2, 2, 16, 32, generator=torch.Generator().manual_seed(seed)) * scale + shift
    assert ((there_and_back(x) - x).abs() <= bound(x)).all()


def test_a_large_channel_of_keys_does_not_cost_the_others():
    """One channel is a hundred times as large for all tokens. Keys keep the precision of the others; values, whose
    groups are channels of one token, do not."""
    x = torch.randn(1, 2, 1, 16, 64, generator=torch.Generator().manual_seed(1))
    x[..., 7] += 100
    error = (there_and_back(x) - x).abs()
    others = [i for i in range(32) if i != 7]
    keys, values = (error[0, plane, 0][:, others].max() for plane in (0, 1))
    assert keys < 0.2 and values > 2


def test_constant_groups_and_values_beyond_float16():
    x = torch.zeros(2, 2, 1, 4, 8)
    x[1] = -7.5
    torch.testing.assert_close(there_and_back(x), x, rtol=0, atol=0)
    x[0, 0, 0, :, 3] = torch.tensor([1e6, -1e6, 0.0, 1e6])
    back = there_and_back(x)
    assert back.isfinite().all() and torch.equal(back[1], x[1])


def test_a_block_is_about_a_third_of_bfloat16():
    geometry = BlockGeometry(30, 3, 64, 16, "bfloat16", "int4")
    assert 0.3 < geometry.pool_bytes / geometry.block_bytes < 0.36
    assert geometry.encoded and not geometry.wire_encoded
    assert geometry.pool_bytes == 30 * geometry.pool_layer_bytes < geometry.encoded_bytes


@given(st.integers(1, 600))
def test_groups_divide_their_axis(length):
    assert length % group_size(length) == 0 and 1 <= group_size(length) <= 32
    assert group_size(length) == size_in_cache(length)

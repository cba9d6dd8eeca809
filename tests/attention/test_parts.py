"""Parts of a context, attended one by one and merged, are the attention over all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import parts as parts_module
from attention.choice.choose import made
from attention.parts import PartBackend, Parts, attend_part, merge
from attention.reference import attend_one

torch.set_num_threads(1)


def context(tokens: int, rows: int, heads: int, kv_heads: int, size: int, seed: int = 0):
    """q, and K and V [kv_heads, tokens, size], in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, heads, size), (kv_heads, tokens, size), (kv_heads, tokens, size)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def truth(q, k, v, scale, cap):
    return attend_one(q, k.transpose(0, 1), v.transpose(0, 1), scale, 0, cap)


@settings(max_examples=60)
@given(st.data())
def test_however_it_is_cut(data):
    rows, heads, kv_heads = data.draw(st.sampled_from([(1, 6, 2), (1, 4, 4), (5, 6, 2), (33, 3, 1)]))
    past, cap = data.draw(st.integers(0, 60)), data.draw(st.sampled_from([0.0, 2.0]))
    q, k, v = context(past + rows, rows, heads, kv_heads, 16, data.draw(st.integers(0, 5)))
    cuts = sorted({0, past, *data.draw(st.lists(st.integers(0, past), max_size=4))})
    found, wanted = Parts(), truth(q, k, v, 0.3, cap)
    q, k, v = (one.float() for one in (q, k, v))
    for begin, end in pairwise(cuts):
        found.add(attend_part(q, k[:, begin:end], v[:, begin:end], 0.3, cap))
    found.add(attend_part(q, k[:, past:], v[:, past:], 0.3, cap, own=True))
    assert (found.merged().double() - wanted).abs().max() < 2e-5


def test_large_parts_are_merged_as_they_come(monkeypatch):
    monkeypatch.setattr(parts_module, "MERGE_BYTES", 1000)
    q, k, v = context(400, 8, 4, 2, 16)
    found, wanted = Parts(), truth(q, k, v, 0.3, 0.0)
    q, k, v = (one.float() for one in (q, k, v))
    for begin in range(0, 392, 49):
        found.add(attend_part(q, k[:, begin : begin + 49], v[:, begin : begin + 49], 0.3))
        assert len(found._waiting) <= 2
    found.add(attend_part(q, k[:, 392:], v[:, 392:], 0.3, own=True))
    assert (found.merged().double() - wanted).abs().max() < 2e-5


def test_a_part_far_below_the_others_weighs_nothing_and_overflows_nothing():
    outs = torch.stack((torch.full((1, 1, 4), 3.0), torch.full((1, 1, 4), 5.0)))
    out, lse = merge(outs, torch.tensor([[[500.0]], [[-500.0]]]))
    assert torch.equal(out, outs[0]) and lse.item() == 500.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 2, 128), (4, 4, 80), (6, 1, 32)])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_the_kernels_of_the_cpu_attend_to_parts(dtype, heads, kv_heads, size, cap):
    """One row over blocks in any order; slots behind its tokens hold NaN."""
    try:
        backend = made("cpu")
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(backend, PartBackend)
    tokens, block, count = 150, 16, 12
    q, k, v = context(tokens, 1, heads, kv_heads, size, 3)
    q, k, v = (one.to(dtype) for one in (q, k, v))
    pool = torch.full((count, 2, kv_heads, block, size), torch.nan, dtype=dtype)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: -(-tokens // block)].int()
    for token in range(tokens):
        pool[table[token // block], 0, :, token % block] = k[:, token]
        pool[table[token // block], 1, :, token % block] = v[:, token]
    out, lse = backend.attend_part(q, pool, table, tokens, 0.2, cap)
    assert out.dtype == lse.dtype == torch.float32 and out.shape == q.shape and lse.shape == (1, heads)
    wide = [one.double() for one in (q, k, v)]
    expected, log_sum = attend_part(wide[0].float(), wide[1].float(), wide[2].float(), 0.2, cap)
    slack = 2e-5 if dtype == torch.float32 else 2e-2
    assert (out - expected).abs().max() < slack and (lse - log_sum).abs().max() < slack
    assert (out.double() - truth(*wide, 0.2, cap)).abs().max() < slack

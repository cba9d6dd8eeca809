"""Tokens between blocks of two forms: what is exact, and what each type leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.codes import DTYPES, encode_rows, from_codes, pool_in
from cache.block import BlockGeometry
from engine.unlike.rows import copy_rows
from engine.unlike.spans import runs, stretches

TYPES = ["float32", "bfloat16", "float16", "int8", "fp8"]
OWN = BlockGeometry(2, 3, 8, 16, "float32")


def pool(geometry: BlockGeometry, blocks: int, fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory uint8, the same as a pool [blocks, *shape])"""
    memory = torch.full((blocks * geometry.block_bytes,), fill, dtype=torch.uint8)
    return memory, pool_in(memory, geometry.shape, geometry.dtype)


def values(*shape: int, seed: int = 3) -> torch.Tensor:
    """Of heads of very different size."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 2, shape[-3])[:, None, None]


def filled(dtype: str, block_size: int = 16, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of this form with values that it can hold."""
    geometry = OWN.like(dtype, block_size)
    memory, kv = pool(geometry, blocks)
    copy_rows(values(blocks, *geometry.shape), 0, kv, 0, block_size)
    return memory, kv


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_of_one_type_stay_byte_for_byte(dtype):
    """Also codes: their scales are copied, not computed again."""
    memory, kv = filled(dtype)
    other, there = pool(OWN.like(dtype, 16), 1, fill=0x55)
    copy_rows(kv, 0, there, 0, 16)
    assert torch.equal(memory, other)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_floats_through_a_wider_type_come_back(narrow):
    memory, kv = filled(narrow)
    _, wide = pool(OWN, 1)
    copy_rows(kv, 0, wide, 0, 16)
    again, back = pool(OWN.like(narrow, 16), 1)
    copy_rows(wide, 0, back, 0, 16)
    assert torch.equal(memory, again)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantized_block_has_what_its_node_would_have_written(dtype):
    x = values(1, *OWN.shape)
    _, kv = pool(OWN.like(dtype, 16), 1)
    copy_rows(x, 0, kv, 0, 16)
    codes, scales = encode_rows(x, DTYPES[dtype])
    _, wide = pool(OWN, 1)
    copy_rows(kv, 0, wide, 0, 16)
    assert torch.equal(wide, from_codes(codes, DTYPES[dtype]) * scales)
    assert 0 < (wide - x).abs().amax() <= scales.amax() * (16 if dtype == "fp8" else 0.5)


@given(
    st.sampled_from(TYPES),
    st.sampled_from([(16, 64), (64, 16), (8, 24), (24, 8), (16, 16)]),
    st.integers(1, 150),
    st.data(),
)
def test_spans_carry_each_token_to_its_place_and_touch_nothing_else(dtype, sizes, tokens, data):
    """A request of `tokens` tokens in blocks of sizes[0], to a node with blocks of sizes[1] that has the first ones."""
    here, there = (OWN.like(dtype, size) for size in sizes)
    blocks = [-(-tokens // size) for size in sizes]
    missing = data.draw(st.integers(0, blocks[1]))
    memory, kv = filled(dtype, sizes[0], blocks[0])
    places = data.draw(st.permutations(range(blocks[1] + 2)))[: blocks[1]]
    target, theirs = pool(there, blocks[1] + 2, fill=0x55)
    wanted, expected = pool(there, blocks[1] + 2, fill=0x55)
    for token in range(missing * sizes[1], tokens):
        (i, row), (j, at) = divmod(token, sizes[0]), divmod(token, sizes[1])
        copy_rows(kv[i], row, expected[places[j]], at, 1)
    for index in range(blocks[0]):
        known = min(sizes[0], tokens - index * sizes[0])
        for one in stretches(index, known, *sizes, missing):
            for layer in range(OWN.num_layers):
                base = index * here.block_bytes + layer * here.layer_bytes
                onto = places[one.block] * there.block_bytes + layer * there.layer_bytes
                for at, to, nbytes in runs(here, one.first, there, one.start, one.count):
                    target[onto + to : onto + to + nbytes] = memory[base + at : base + at + nbytes]
    if sizes[0] != sizes[1]:
        assert torch.equal(target, wanted)
    else:  # whole blocks move, with what lies behind the last token
        for j in range(missing, blocks[1]):
            known = min(sizes[1], tokens - j * sizes[1])
            left, right = pool(there, 1), pool(there, 1)
            copy_rows(theirs[places[j]], 0, left[1][0], 0, known)
            copy_rows(expected[places[j]], 0, right[1][0], 0, known)
            assert torch.equal(left[0], right[0])

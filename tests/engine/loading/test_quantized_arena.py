"""A model over a quantized arena: logits near those of a float one, on every backend, however its blocks are filled."""

import pytest
import torch

from attention.choice.choose import choose
from attention.codes import pool_in
from cache.block import BlockGeometry
from engine.model.decoder import Model
from engine.step.inputs import Row
from engine.step.runner import Runner
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of, our_config, our_weights, runner, tiny

TOKENS = [7 * i % 211 for i in range(70)]
BLOCKS = [3, 0, 4, 1, 5]
FAR = {"int8": 12, "fp8": 50}
"""How much further off logits may be than over an arena of bfloat16: roundings are 5 and 23 times as large."""


def quantized(theirs, backend: str, kv_dtype: str) -> Runner:
    """As tiny_llama.runner; scales of NaN in place of what is not written."""
    config = our_config(theirs)
    model = Model(config, our_weights(theirs), choose(backend, "cpu", config.head_size, kv_dtype))
    shape = BlockGeometry(config.num_layers, config.num_kv_heads, config.head_size, BLOCK_SIZE, kv_dtype)
    memory = torch.full((8 * shape.block_bytes,), 0xFF, dtype=torch.uint8)
    return Runner(model, pool_in(memory, shape.shape, kv_dtype), BLOCK_SIZE)


def in_pieces(ours: Runner, *ends: int) -> torch.Tensor:
    """Logits of all tokens, computed up to each of `ends` in turn."""
    parts, start = [], 0
    for end in ends:
        parts.append(logits_of(ours, [Row(TOKENS[start:end], start, BLOCKS)]))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("kv_dtype", sorted(FAR))
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_logits_are_near_those_of_floats(backend, kv_dtype):
    theirs = tiny()
    wide, half = runner(theirs, "reference"), runner(theirs, "reference")
    half.kv_pool = half.kv_pool.to(torch.bfloat16)
    exact = in_pieces(wide, len(TOKENS))
    unit = (in_pieces(half, len(TOKENS)) - exact).square().mean().sqrt()
    once = in_pieces(quantized(theirs, backend, kv_dtype), len(TOKENS))
    filled = in_pieces(quantized(theirs, backend, kv_dtype), 5, *range(6, 20), 50, *range(51, len(TOKENS) + 1))
    for found in (once - exact, filled - exact, filled - once):
        assert found.square().mean().sqrt() < FAR[kv_dtype] * unit
    assert not torch.equal(once, exact)


def test_the_bytes_are_those_of_the_geometry():
    """What is pushed and pooled is cut by cache/block.py, what is computed with by attention/codes.py."""
    ours = quantized(tiny(), "torch", "int8")
    shape = BlockGeometry(3, 2, 32, BLOCK_SIZE, "int8")
    layers = ours.kv_pool.view(torch.uint8)
    assert (layers.stride(0), layers.stride(1)) == (shape.block_bytes, shape.layer_bytes)
    in_pieces(ours, 20)
    memory = torch.empty(0, dtype=torch.uint8).set_(layers.untyped_storage()).view(8, 3, shape.layer_bytes)
    written = (memory != 0xFF).float().mean(-1)  # share of a layer's bytes; a code may be 0xFF too
    assert (written[3] > 0.9).all() and (written[0] > 0.2).all() and (written[0] < 0.27).all()
    assert not written[[1, 2, 4, 5, 6, 7]].any()


def test_roundings_of_another_batch_shape_turn_codes_by_one_and_no_further():
    """Why tokens over int8 may depend on what is computed together, as drafts are with the token before them: products
    of another shape round differently by some 1e-6, and a value next to the border of two codes gets the other one.
    The mathematics is the same: codes differ by one, few of them, and logits by the little that comes of it."""
    theirs = tiny()
    single, drafted = quantized(theirs, "cpu", "int8"), quantized(theirs, "cpu", "int8")
    ends = [40, *range(41, 71)], [40, *range(46, 71, 6)]
    one, many = in_pieces(single, *ends[0]), in_pieces(drafted, *ends[1])
    codes = [runner.kv_pool.view(torch.int8)[BLOCKS].int() for runner in (single, drafted)]
    turned = (codes[0] - codes[1]).abs()
    assert turned.max() <= 1
    assert (turned > 0).float().mean() < 0.02
    torch.testing.assert_close(one, many, atol=0.02, rtol=0.01)

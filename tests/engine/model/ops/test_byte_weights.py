"""Products of int8 and fp8 weights with float32 scales, by the kernels of every level, against float64.

A row that meets int8 weights is rounded to signed bytes as a whole (test_quantized.py), one that meets fp8 weights is
not. Hypothesis prints the shape and the seed of a case that fails.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.cpu.level import levels_here
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import SHARED, Quantized, Scaled, products_of, stacked
from tests.engine.model.ops.test_quantized import FLOAT32_SUMS, ROUNDING, check, random, rows_of

HERE = levels_here()
pytestmark = pytest.mark.skipif(not HERE, reason="CpuOps needs x86 with AVX2, or aarch64")
CASES = [(level, torch.bfloat16) for level in HERE] + [
    (level, torch.float32) for level in HERE if level in (HERE[0], "avx2", "neon")
]
EVERY = pytest.mark.parametrize(
    ("level", "dtype"),
    [*CASES, (HERE[0] if HERE else "", torch.float16)],
    ids=lambda each: str(each).removeprefix("torch."),
)
KINDS = pytest.mark.parametrize("kind", SHARED)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def matrix(kind: str, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> tuple[Scaled, Tensor]:
    """Some weights of any codes but NaN, and what they mean in float64. Typical values are below 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // SHARED[kind]) if SHARED[kind] else 1
    scales = torch.rand(outputs, groups, generator=generator).add(0.1) / 128
    if kind == "int8":
        each, wide = inputs, codes.view(torch.int8).double()
    else:
        codes[(codes & 0x7F) == 0x7F] = 0x80
        each, wide = 128, codes.view(torch.float8_e4m3fn).double()
    meant = wide * scales.double().repeat_interleave(each, 1)[:, :inputs]
    return Scaled(kind, codes, scales, dtype), meant


def check_product(result: Tensor, x: Tensor, w: Tensor, kind: str) -> None:
    if kind == "int8":
        return check(result, x, w, w.shape[1])
    exact, sizes = x.double() @ w.T, x.double().abs() @ w.abs().T
    last = ROUNDING[result.dtype] * exact.abs() + (2.0**-25 if result.dtype == torch.float16 else 1e-30)
    assert ((result.double() - exact).abs() <= FLOAT32_SUMS * sizes + last).all()
    return None


def rows_for(kind: str, rows: int, inputs: int, seed: int, dtype: torch.dtype) -> Tensor:
    if kind == "int8":
        return rows_of(rows, inputs, group=inputs, seed=seed, dtype=dtype)
    return random(rows, inputs, seed=seed, dtype=dtype)


@KINDS
def test_widened_is_what_the_codes_mean(kind):
    weight, meant = matrix(kind, 7, 160, 1, torch.float32)
    torch.testing.assert_close(weight.widened().double(), meant, rtol=2**-23, atol=0)
    assert weight.shape == (7, 160) and weight.nbytes == 7 * 160 + 4 * 7 * (1 if kind == "int8" else 2)
    assert torch.equal(TorchOps().linear(weight)(torch.eye(160)).T, weight.widened())


@EVERY
@KINDS
@settings(max_examples=12, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([40, 97, 200])),
    inputs=st.one_of(st.integers(1, 9), st.sampled_from([18, 48, 90])),
    outputs=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_every_shape(level, dtype, kind, rows, inputs, outputs, seed):
    """`inputs` in units of 32."""
    ops = CpuOps(level, dtype, "bytes")
    weight, w = matrix(kind, outputs, 32 * inputs, seed, dtype)
    x, bias = rows_for(kind, rows, 32 * inputs, seed + 1, dtype), random(outputs, seed=seed, dtype=dtype)
    check_product(ops.linear(weight)(x), x, w, kind)
    vocabulary = ops.vocabulary(weight)
    logits = vocabulary.logits(x)
    assert logits.dtype == torch.float32
    check_product(logits, x, w, kind)
    biased = ops.linear(weight, bias)(x)
    torch.testing.assert_close(biased.float(), logits + bias.float(), rtol=2 * ROUNDING[dtype], atol=1e-6)
    ids = torch.arange(-1, 2 * outputs, 2)[1:] % outputs
    torch.testing.assert_close(vocabulary.embed(ids).double(), w[ids], rtol=2 * ROUNDING[dtype], atol=1e-7)


@EVERY
@pytest.mark.parametrize("rows", [1, 200])
def test_every_code_of_e4m3(level, dtype, rows):
    """One input at a time, in registers and through the cache: exact, numbers below 2^-6 too."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1).T.contiguous()
    codes[(codes & 0x7F) == 0x7F] = 0
    ones = torch.ones(256, 1)
    run = CpuOps(level, dtype, "bytes").linear(Scaled("fp8", codes, ones, dtype))
    expected = codes[:, 0].view(torch.float8_e4m3fn).to(dtype)
    for place in (0, 1, 127):
        x = torch.zeros(rows, 128, dtype=dtype)
        x[:, place] = 1
        assert torch.equal(run(x), expected.expand(rows, -1))


@EVERY
def test_the_largest_exact_sum_of_int8(level, dtype):
    """65,536 products of the largest bytes stay below 2^31, as they are stored too (with 128 more)."""
    inputs = 1 << 16
    codes = torch.tensor([[127], [-127], [-128]], dtype=torch.int8).expand(3, inputs).contiguous().view(torch.uint8)
    run = CpuOps(level, dtype, "bytes").linear(Scaled("int8", codes, torch.full((3, 1), 2.0**-20), dtype))
    exact = torch.tensor([127, -127, -128]).double() * 2.0**-4
    for sign in (1, -1):
        for rows in (1, 13):
            found = run(torch.full((rows, inputs), sign, dtype=dtype)).double()
            torch.testing.assert_close(found, (sign * exact).expand(rows, -1), rtol=2 * ROUNDING[dtype], atol=0)


@EVERY
@KINDS
@pytest.mark.parametrize("inner", [5, 16, 33, 1536])
def test_gated(level, dtype, kind, inner):
    """The gate is made here of what `linear` gives in float32."""
    ops = CpuOps(level, dtype, "bytes")
    weight, _ = matrix(kind, 2 * inner, 96, inner, dtype)
    for rows in (1, 3, 100):
        x = random(rows, 96, seed=rows, dtype=dtype)
        both = ops.vocabulary(weight).logits(x).double()
        expected = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
        found = ops.gated_linear(weight)(x).double()
        torch.testing.assert_close(found, expected, rtol=4 * ROUNDING[dtype] + 1e-3, atol=1e-5)


@EVERY
@KINDS
def test_rows_of_zeros_outliers_and_tiny_numbers(level, dtype, kind):
    ops = CpuOps(level, dtype, "bytes")
    weight, w = matrix(kind, 40, 192, 3, dtype)
    x = torch.zeros(4, 192, dtype=dtype)
    x[1, 5], x[1, 6] = 1000, 1e-3
    x[2] = 6e-8
    x[3, 40:] = -1
    found = ops.linear(weight)(x)
    assert (found[0] == 0).all()
    check_product(found, x, w, kind)


@EVERY
@KINDS
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(level, dtype, kind):
    run = CpuOps(level, dtype, "bytes").linear(matrix(kind, 70, 1600, 5, dtype)[0])
    wide = random(300, 1800, seed=6, dtype=dtype)
    x = wide[:, 100:1700]  # rows that are not adjacent
    whole = run(x)
    for rows in (1, 2, 3, 4, 5, 7, 13, 40):
        assert torch.equal(run(x[:rows]), whole[:rows]), rows
    assert run(x[:0]).shape == (0, 70)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(run(x), whole) and torch.equal(run(x[:3]), whole[:3])


@EVERY
@KINDS
def test_what_follows_attention(level, dtype, kind):
    """In one call: within 5 % of float64, where each of the products rounds its rows of int8 as a whole."""
    ops, (hidden, inner, heads) = CpuOps(level, dtype, "bytes"), (96, 160, 64)
    sizes = {"o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "following": (70, hidden)}
    given = {}
    for seed, (name, shape) in enumerate(sizes.items()):
        weight, w = matrix(kind, *shape, seed, dtype)
        given[name] = Scaled(kind, weight.codes, weight.scales / w.norm(dim=-1).mean().float(), dtype)
    norms = [random(hidden, seed=seed, dtype=dtype) for seed in (8, 9)]

    def tail(each, matrices, norms):
        return each.tail(
            each.linear(matrices["o"]),
            norms[0],
            each.gated_linear(matrices["gate_up"]),
            each.linear(matrices["down"]),
            norms[1],
            1e-5,
            each.linear(matrices["following"]),
        )

    run = tail(ops, given, norms)
    wide = {name: each.widened().double() for name, each in given.items()}
    exact = tail(TorchOps(), wide, [norm.double() for norm in norms])
    for m in (1, 3, 33, 192, 300):
        attended, x = random(m, heads, seed=m, dtype=dtype), random(m, hidden, seed=m + 1, dtype=dtype)
        truth = exact(attended.double(), x.double())
        for ours, expected in zip(run(attended.clone(), x.clone()), truth, strict=True):
            assert (ours.double() - expected).norm() <= 0.05 * expected.norm(), m


def test_stacked_matrices_keep_their_scales():
    one, other = (matrix("fp8", outputs, 160, outputs, torch.float32)[0] for outputs in (3, 5))
    both = stacked([one, other])
    assert isinstance(both, Scaled) and torch.equal(both.widened(), torch.cat([one.widened(), other.widened()]))
    for wrong in (torch.ones(4, 160), matrix("int8", 4, 160, 0, torch.float32)[0]):
        with pytest.raises(ValueError, match="only some of the matrices"):
            stacked([one, wrong])


def test_the_products_of_a_model():
    fp8 = matrix("fp8", 4, 32, 0, torch.float32)[0]
    groups = Quantized("q8_0", torch.zeros(4, 34, dtype=torch.uint8), torch.float32)
    assert products_of([torch.ones(3), fp8]) == "bytes"
    assert products_of([torch.ones(3), groups]) == products_of([stacked([groups, groups])]) == "groups"
    assert products_of([torch.ones(3)]) == "elements"


def test_rounding_to_fp8():
    """Within 2^-4 of each value, or half a step of the smallest numbers; the largest of a row stays."""
    values = random(40, 160, seed=2) * torch.logspace(-6, 6, 40)[:, None]
    values[3] = 0
    weight = Scaled.fp8(values, torch.float32)
    wide, most = weight.widened(), values.abs().amax(1, keepdim=True)
    assert ((wide - values).abs() <= torch.maximum(values.abs() / 16, most / 448 * 2**-10) * 1.001).all()
    torch.testing.assert_close(wide.abs().amax(1, keepdim=True), most, rtol=1e-6, atol=0)

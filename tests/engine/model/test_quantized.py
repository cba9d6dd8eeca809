"""Products of quantized weights by the kernels of every level, against float64.

A row x is rounded to signed bytes in groups of 32: x = e c with e = max |x| / 127. So a result is exact for the rounded
row but for float32 sums, and at most e / 2 times the sum of |w| away from that of x itself, group by group. Hypothesis
prints the shape and the seed of a case that fails.
"""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.cpu.level import levels_here
from engine.model.ops import TorchOps
from engine.model.ops_cpu import ELEMENTS, CpuOps
from engine.model.quantized import GROUP, GROUP_BYTES, Quantized, stacked

HERE = levels_here()
pytestmark = pytest.mark.skipif(not HERE, reason="CpuOps needs x86 with AVX2, or aarch64")
EVERY = pytest.mark.parametrize(
    ("level", "dtype"),
    [(level, dtype) for level in HERE for dtype in ELEMENTS],
    ids=lambda each: str(each).removeprefix("torch."),
)
KINDS = pytest.mark.parametrize("kind", GROUP_BYTES)

FLOAT32_SUMS = 2.0**-16
"""Relative to the sum of |x| times the largest |w| of a group: some hundred float32 operations, each 2^-24."""
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(kind: str, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> tuple[Quantized, Tensor]:
    """Some weights, and in float64 what the gguf package reads from the same bytes. Every byte may occur."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(
        0, 256, (outputs, inputs // GROUP, GROUP_BYTES[kind]), generator=generator, dtype=torch.uint8
    )
    scales = torch.randn(outputs, inputs // GROUP, 2, generator=generator).mul(0.02).half()
    width = 4 if kind == "q4_1" else 2
    groups[..., :width] = scales.view(torch.uint8)[..., :width]
    groups = groups.view(outputs, -1)
    meant = gguf.dequantize(groups.numpy(), GGMLQuantizationType[kind.upper()])
    return Quantized(kind, groups, dtype), torch.from_numpy(meant).double()


def in_groups(x: Tensor) -> Tensor:
    return x.view(len(x), -1, GROUP)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as the kernels multiply them, in float64, and the step e of each group [rows, groups]."""
    wide = in_groups(x.float())
    most = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, 127 / most, 0)
    step = (most / 127).double()
    return ((wide.double() * inverse.double()).round() * step).view(x.shape), step.squeeze(-1)


def rows_of(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random rows without values that lie between two codes, where the last bit of a product decides."""
    x = random(*shape, seed=seed, dtype=dtype)
    near, step = rounded(x)
    steps = in_groups(x.double()) / step[..., None]
    between = ((steps - steps.floor() - 0.5).abs() < 1e-3).view(x.shape)
    return torch.where(between, near.to(dtype), x)


def check(result: Tensor, x: Tensor, w: Tensor) -> None:
    """`result` [rows, outputs] is x w^T for w in float64."""
    near, step = rounded(x)
    largest = in_groups(w).abs().amax(-1)  # [outputs, groups]
    sums = FLOAT32_SUMS * in_groups(near).abs().sum(-1) @ largest.T
    exact = near @ w.T
    last = ROUNDING[result.dtype] * exact.abs() + (2.0**-25 if result.dtype == torch.float16 else 1e-30)  # subnormal
    assert ((result.double() - exact).abs() <= sums + last).all()
    from_x = (step / 2) @ in_groups(w).abs().sum(-1).T
    assert ((result.double() - x.double() @ w.T).abs() <= 1.001 * from_x + sums + last).all()


@KINDS
def test_widened_is_what_the_gguf_package_reads(kind):
    weight, meant = matrix(kind, 7, 96, 1, torch.float32)
    assert weight.shape == meant.shape
    torch.testing.assert_close(weight.widened().double(), meant, rtol=1e-6, atol=1e-6)
    assert torch.equal(TorchOps().linear(weight)(torch.eye(96)).T, weight.widened())


@EVERY
@KINDS
@settings(max_examples=25, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([40, 97, 200])),
    groups=st.one_of(st.integers(1, 5), st.sampled_from([18, 48, 90])),
    outputs=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_every_shape(level, dtype, kind, rows, groups, outputs, seed):
    ops = CpuOps(level, dtype, quantized=True)
    weight, w = matrix(kind, outputs, groups * GROUP, seed, dtype)
    x = rows_of(rows, groups * GROUP, seed=seed + 1, dtype=dtype)
    check(ops.linear(weight)(x), x, w)
    vocabulary = ops.vocabulary(weight)
    logits = vocabulary.logits(x)
    assert logits.dtype == torch.float32
    check(logits, x, w)
    ids = torch.arange(-1, 2 * outputs, 2)[1:] % outputs
    torch.testing.assert_close(vocabulary.embed(ids).double(), w[ids], rtol=2 * ROUNDING[dtype], atol=1e-5)


@EVERY
@KINDS
@pytest.mark.parametrize("inner", [5, 16, 33, 1536])
def test_gated(level, dtype, kind, inner):
    """The product alone is exact to float32: so is the gate, made here of what `linear` gives in float32."""
    ops, wide = (CpuOps(level, each, quantized=True) for each in (dtype, torch.float32))
    weight, _ = matrix(kind, 2 * inner, 96, inner, dtype)
    for rows in (1, 3, 100):
        x = random(rows, 96, seed=rows, dtype=dtype)
        both = wide.linear(Quantized(kind, weight.groups, torch.float32))(x.float()).double()
        expected = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
        found = ops.gated_linear(weight)(x).double()
        torch.testing.assert_close(found, expected, rtol=4 * ROUNDING[dtype] + 1e-3, atol=1e-5)


@EVERY
@KINDS
def test_rows_of_zeros_outliers_and_tiny_numbers(level, dtype, kind):
    ops = CpuOps(level, dtype, quantized=True)
    weight, w = matrix(kind, 40, 64, 3, dtype)
    x = torch.zeros(4, 64, dtype=dtype)
    x[1, 5], x[1, 6] = 1000, 1e-3
    x[2] = 6e-8
    x[3, 40:] = -1
    found = ops.linear(weight)(x)
    assert (found[0] == 0).all()
    check(found, x, w)


@EVERY
@KINDS
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(level, dtype, kind):
    ops = CpuOps(level, dtype, quantized=True)
    run = ops.linear(matrix(kind, 70, 1536, 5, dtype)[0])
    wide = random(300, 1700, seed=6, dtype=dtype)
    x = wide[:, 100:1636]  # rows that are not adjacent
    whole = run(x)
    for rows in (1, 2, 3, 7, 13, 40):
        assert torch.equal(run(x[:rows]), whole[:rows]), rows
    assert run(x[:0]).shape == (0, 70)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(run(x), whole) and torch.equal(run(x[:3]), whole[:3])


@EVERY
@KINDS
def test_what_follows_attention(level, dtype, kind):
    """In one call: within 3 % of float64 with the widened weights, where each of the three products rounds its rows to
    about 0.6 % (a step of max / 127, max 2.5 times the root mean square, an error of 0.29 steps)."""
    ops = CpuOps(level, dtype, quantized=True)
    sizes = {"o": (96, 64), "gate_up": (320, 96), "down": (96, 160), "following": (70, 96)}
    made = {name: matrix(kind, *size, seed, dtype) for seed, (name, size) in enumerate(sizes.items())}
    scaled = {name: w / w.norm(dim=-1).mean() for name, (_, w) in made.items()}
    given = {}
    for name, w in scaled.items():
        rows = gguf.quantize(w.float().numpy(), GGMLQuantizationType[kind.upper()])
        given[name] = Quantized(kind, torch.from_numpy(rows), dtype)
    norms = [random(96, seed=seed, dtype=dtype) for seed in (8, 9)]

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
    exact = tail(
        TorchOps(), {name: each.widened().double() for name, each in given.items()}, [norm.double() for norm in norms]
    )
    for m in (1, 3, 33, 192, 300):
        attended, x = random(m, 64, seed=m, dtype=dtype), random(m, 96, seed=m + 1, dtype=dtype)
        truth = exact(attended.double(), x.double())
        for ours, expected in zip(run(attended.clone(), x.clone()), truth, strict=True):
            assert (ours.double() - expected).norm() <= 0.03 * expected.norm(), m


def test_matrices_of_one_product_must_have_one_kind():
    one, other = (matrix(kind, 4, 32, 0, torch.float32)[0] for kind in ("q4_0", "q8_0"))
    assert torch.equal(stacked([one, one]).widened(), torch.cat([one.widened()] * 2))
    for parts in ([one, other], [one, torch.ones(4, 32)]):
        with pytest.raises(ValueError, match="several types"):
            stacked(parts)

"""Products of quantized weights by the kernels of every level, against float64.

A row x is rounded to signed bytes in the groups of the weight: x = e c with e = max |x| / 127. So a result is exact for
the rounded row but for float32 sums, and at most e / 2 times the sum of |w| away from that of x itself, group by group.
Hypothesis prints the shape and the seed of a case that fails.
"""

from __future__ import annotations

import math

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.cpu.level import levels_here
from engine.model.ops.cpu import ELEMENTS, CpuOps
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import BLOCKS, Mixed, Quantized, stacked, widened
from tests.heavy import best_first

HERE = levels_here()
pytestmark = pytest.mark.skipif(not HERE, reason="CpuOps needs x86 with AVX2, or aarch64")
EVERY = pytest.mark.parametrize(
    ("level", "dtype"),
    best_first(HERE, list(ELEMENTS)),
    ids=lambda each: str(each).removeprefix("torch."),
)
WITH_MINIMA = ("q4_1", "q4_k", "q5_k")
GROUPS = {kind: 16 if kind == "q6_k" else 32 for kind in BLOCKS}
"""Inputs with one scale."""
LARGEST = {kind: 32 if inputs == 256 else 1 for kind, (inputs, _) in BLOCKS.items()}
"""Typical integer scale of a group: float16 numbers divided by it give weights of about the same size."""
KINDS = pytest.mark.parametrize("kind", BLOCKS)

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


def matrix(
    kind: str, outputs: int, blocks: int, seed: int, dtype: torch.dtype, factor: float = 1
) -> tuple[Quantized, Tensor]:
    """Some weights, and in float64 what the gguf package reads from the same bytes. Every byte may occur, except that
    the float16 numbers are normal random ones times 0.02 `factor`, and powers of two are near it."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (outputs, blocks, BLOCKS[kind][1]), generator=generator, dtype=torch.uint8)
    scales = torch.randn(outputs, blocks, 2, generator=generator).mul(0.02 * factor).half().view(torch.uint8)
    if kind == "mxfp4":
        power = round(math.log2(0.02 * factor)) + 127
        stored[..., 0] = torch.randint(power - 3, power + 1, (outputs, blocks), generator=generator)
    elif kind == "q6_k":
        stored[..., -2:] = scales[..., :2]
    else:
        width = 4 if kind in WITH_MINIMA else 2
        stored[..., :width] = scales[..., :width]
    stored = stored.view(outputs, -1)
    meant = gguf.dequantize(stored.numpy(), GGMLQuantizationType[kind.upper()])
    return Quantized(kind, stored, dtype), torch.from_numpy(meant).double()


def in_groups(x: Tensor, group: int) -> Tensor:
    return x.view(len(x), -1, group)


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows as the kernels multiply them, in float64, and the step e of each group [rows, groups]."""
    wide = in_groups(x.float(), group)
    most = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, 127 / most, 0)
    step = (most / 127).double()
    return ((wide.double() * inverse.double()).round() * step).view(x.shape), step.squeeze(-1)


def rows_of(*shape: int, group: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random rows without values that lie between two codes, where the last bit of a product decides."""
    x = random(*shape, seed=seed, dtype=dtype)
    near, step = rounded(x, group)
    steps = in_groups(x.double(), group) / step[..., None]
    between = ((steps - steps.floor() - 0.5).abs() < 1e-3).view(x.shape)
    return torch.where(between, near.to(dtype), x)


def check(result: Tensor, x: Tensor, w: Tensor, group: int) -> None:
    """`result` [rows, outputs] is x w^T for w in float64."""
    near, step = rounded(x, group)
    largest = in_groups(w, group).abs().amax(-1)  # [outputs, groups]
    sums = FLOAT32_SUMS * in_groups(near, group).abs().sum(-1) @ largest.T
    exact = near @ w.T
    last = ROUNDING[result.dtype] * exact.abs() + (2.0**-25 if result.dtype == torch.float16 else 1e-30)  # subnormal
    assert ((result.double() - exact).abs() <= sums + last).all()
    from_x = (step / 2) @ in_groups(w, group).abs().sum(-1).T
    assert ((result.double() - x.double() @ w.T).abs() <= 1.001 * from_x + sums + last).all()


@KINDS
def test_widened_is_what_the_gguf_package_reads(kind):
    weight, meant = matrix(kind, 7, 3, 1, torch.float32)
    assert weight.shape == meant.shape == (7, 3 * BLOCKS[kind][0])
    assert torch.equal(weight.widened().double(), meant)
    assert torch.equal(TorchOps().linear(weight)(torch.eye(meant.shape[1])).T, weight.widened())


@EVERY
@KINDS
@settings(max_examples=12, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([40, 97, 200])),
    inputs=st.one_of(st.integers(1, 5), st.sampled_from([18, 48, 90])),
    outputs=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_every_shape(level, dtype, kind, rows, inputs, outputs, seed):
    """`inputs` in units of 32, or in blocks of 256."""
    ops, group = CpuOps(level, dtype, products="groups"), GROUPS[kind]
    weight, w = matrix(kind, outputs, -(-inputs * 32 // BLOCKS[kind][0]), seed, dtype, 1 / LARGEST[kind])
    x = rows_of(rows, w.shape[1], group=group, seed=seed + 1, dtype=dtype)
    check(ops.linear(weight)(x), x, w, group)
    vocabulary = ops.vocabulary(weight)
    logits = vocabulary.logits(x)
    assert logits.dtype == torch.float32
    check(logits, x, w, group)
    ids = torch.arange(-1, 2 * outputs, 2)[1:] % outputs
    torch.testing.assert_close(vocabulary.embed(ids).double(), w[ids], rtol=2 * ROUNDING[dtype], atol=1e-5)


@EVERY
def test_every_code_and_scale_of_mxfp4(level, dtype):
    """From 2^-127 to 2^124: exact, but for float32's numbers without a leading one, which the instruction for bfloat16
    takes for zeros."""
    scales = torch.arange(125 + 127, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    weight = Quantized("mxfp4", torch.cat((scales, codes | (15 - codes) << 4), 1), dtype)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    exact = torch.cat((values, values.flip(0))) * 2.0 ** (scales.double() - 127)
    rows = CpuOps(level, dtype, products="groups").vocabulary(weight).embed(torch.arange(len(scales)))
    torch.testing.assert_close(rows, exact.to(dtype), rtol=0, atol=torch.finfo(torch.float32).tiny)
    assert torch.equal(weight.widened(), exact.to(dtype))


@EVERY
@KINDS
@pytest.mark.parametrize("inner", [5, 16, 33, 1536])
def test_gated(level, dtype, kind, inner):
    """The product alone is exact to float32: so is the gate, made here of what `linear` gives in float32."""
    ops, wide = (CpuOps(level, each, products="groups") for each in (dtype, torch.float32))
    weight, w = matrix(kind, 2 * inner, 3 if BLOCKS[kind][0] == 32 else 1, inner, dtype, 1 / LARGEST[kind])
    for rows in (1, 3, 100):
        x = random(rows, w.shape[1], seed=rows, dtype=dtype)
        both = wide.linear(Quantized(kind, weight.blocks, torch.float32))(x.float()).double()
        expected = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
        found = ops.gated_linear(weight)(x).double()
        torch.testing.assert_close(found, expected, rtol=4 * ROUNDING[dtype] + 1e-3, atol=1e-5)


@EVERY
@KINDS
def test_rows_of_zeros_outliers_and_tiny_numbers(level, dtype, kind):
    ops = CpuOps(level, dtype, products="groups")
    weight, w = matrix(kind, 40, 2, 3, dtype, 1 / LARGEST[kind])
    x = torch.zeros(4, w.shape[1], dtype=dtype)
    x[1, 5], x[1, 6] = 1000, 1e-3
    x[2] = 6e-8
    x[3, 40:] = -1
    found = ops.linear(weight)(x)
    assert (found[0] == 0).all()
    check(found, x, w, GROUPS[kind])


@EVERY
@KINDS
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(level, dtype, kind):
    ops = CpuOps(level, dtype, products="groups")
    run = ops.linear(matrix(kind, 70, 1536 // BLOCKS[kind][0], 5, dtype, 1 / LARGEST[kind])[0])
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
    ops = CpuOps(level, dtype, products="groups")
    inputs, _ = BLOCKS[kind]
    hidden, inner, heads = (inputs * count for count in ((3, 5, 2) if inputs == 32 else (1, 2, 1)))
    sizes = {"o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "following": (70, hidden)}
    given = {}
    for seed, (name, (outputs, width)) in enumerate(sizes.items()):
        _, w = matrix(kind, outputs, width // inputs, seed, dtype, 1 / LARGEST[kind])
        factor = 1 / LARGEST[kind] / w.norm(dim=-1).mean().item()
        given[name] = matrix(kind, outputs, width // inputs, seed, dtype, factor)[0]
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
    exact = tail(
        TorchOps(), {name: each.widened().double() for name, each in given.items()}, [norm.double() for norm in norms]
    )
    for m in (1, 3, 33, 192, 300):
        attended, x = random(m, heads, seed=m, dtype=dtype), random(m, hidden, seed=m + 1, dtype=dtype)
        truth = exact(attended.double(), x.double())
        for ours, expected in zip(run(attended.clone(), x.clone()), truth, strict=True):
            assert (ours.double() - expected).norm() <= 0.03 * expected.norm(), m


@EVERY
def test_matrices_of_several_kinds_in_one_product(level, dtype):
    """q, k and v of a file in Q4_K_M: each part is what it is alone, bit for bit, whatever the threads."""
    ops = CpuOps(level, dtype, products="groups")
    parts = [
        matrix(kind, outputs, 512 // BLOCKS[kind][0], outputs, dtype, 1 / LARGEST[kind])[0]
        for kind, outputs in (("q4_k", 96), ("q8_0", 32), ("q6_k", 70))
    ]
    bias, together = random(198, seed=4, dtype=dtype), stacked(parts)
    assert isinstance(together, Mixed) and together.shape == (198, 512) and together.widened().shape == (198, 512)
    x, at = random(200, 512, seed=3, dtype=dtype), 0
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, at = ops.linear(together, bias)(x), 0
        for part in parts:
            end = at + part.shape[0]
            assert torch.equal(y[:, at:end], ops.linear(part, bias[at:end])(x)), (threads, part.kind)
            assert torch.equal(ops.linear(together, bias)(x[:3])[:, at:end], y[:3, at:end])
            at = end
    with pytest.raises(ValueError, match="whole blocks"):
        ops.linear(stacked([parts[2], parts[0]]))


def test_quantized_and_plain_matrices_are_not_stacked():
    one = matrix("q4_0", 4, 1, 0, torch.float32)[0]
    assert torch.equal(widened(stacked([one, one])), torch.cat([one.widened()] * 2))
    with pytest.raises(ValueError, match="only some of the matrices"):
        stacked([one, torch.ones(4, 32)])

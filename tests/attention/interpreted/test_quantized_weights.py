"""Products with quantized weights against float64: every type, ragged shapes, few and many rows, splits, models."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.codes import encode_rows
from attention.torch_backend import TorchBackend
from attention.triton.products.byte_product import SHARED as GROUP
from attention.triton.products.byte_product import rounded
from attention.triton.products.group_planes import planes_of
from attention.triton.products.group_product import splits_for
from engine.model.decoder import Model
from engine.model.model_config import ModelConfig
from engine.model.ops.choice import choose_ops
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled, stacked
from engine.model.ops.triton import TritonOps
from engine.step.inputs import InputBuilder, Row
from net.compiled import NotCompiled
from tests.attention.interpreted.cases import DEVICE, DTYPES
from tests.attention.interpreted.quantized_weights import quantized, scaled

SHAPES = ((1, 5, 8), (3, 70, 2), (17, 130, 3), (70, 64, 1))
"""Rows, outputs, and inputs in units of 256. The first one is split."""

SUMS = 2.0**-19
"""Relative to the sum of |x| |w|: float32 sums of some hundred products."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OPS = TritonOps(fp8_rows=False)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pairs(*kinds: str) -> list[Any]:
    """(kind, shape, dtype): all shapes of a kind, with the types in turns, because a GPU compiles each for seconds."""
    found = []
    for (i, kind), (j, shape) in product(enumerate(kinds), enumerate(SHAPES)):
        marks = [pytest.mark.heavy] if j and (i + j) % 2 else []
        found.append(pytest.param(kind, shape, DTYPES[(i + j) % len(DTYPES)], marks=marks))
    return found


def check(result: Tensor, x: Tensor, w: Tensor, rounding: float = 0.0, bias: Tensor | None = None) -> None:
    """`result` is x w^T + bias for w in float64, each of whose elements may be rounded."""
    exact, sizes = x.double() @ w.T, x.double().abs() @ w.abs().T
    exact = exact if bias is None else exact + bias.double()
    last = ROUNDING[result.dtype] * exact.abs() + 1e-6
    worst = ((result.double() - exact).abs() - (SUMS + rounding) * sizes - last).max()
    assert worst <= 0, worst


@pytest.mark.parametrize(("kind", "shape", "dtype"), pairs(*BLOCKS))
def test_groups(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, units = shape
    weight, w = quantized(kind, outputs, units * 256 // BLOCKS[kind][0], rows, dtype)
    x, bias = random(rows, w.shape[1], seed=1, dtype=dtype), random(outputs, seed=2, dtype=dtype)
    check(OPS.linear(weight, bias)(x), x, w, ROUNDING[dtype], bias)
    vocabulary = OPS.vocabulary(weight)
    logits = vocabulary.logits(x)
    assert logits.dtype == torch.float32
    check(logits, x, w, ROUNDING[dtype])
    ids = torch.tensor([outputs - 1, 0, outputs // 2], device=DEVICE)  # few: a program for each 128 inputs
    torch.testing.assert_close(vocabulary.embed(ids).double(), w[ids], rtol=2 * ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("kind", [kind for kind, (inputs, _) in BLOCKS.items() if inputs == 32])
@pytest.mark.parametrize("blocks", [1, 5, 18])
def test_inputs_that_are_no_whole_tiles(kind: str, blocks: int) -> None:
    weight, w = quantized(kind, 33, blocks, blocks, torch.float32)
    wide = random(4, 3 * w.shape[1], seed=1)
    x = wide[:, w.shape[1] : 2 * w.shape[1]]  # rows that are not adjacent
    check(OPS.linear(weight)(x), x, w)


@pytest.mark.parametrize("kind", BLOCKS)
def test_planes_take_the_bytes_of_the_file(kind: str) -> None:
    weight, w = quantized(kind, 3, 2, 1, torch.float32)
    more = {"q4_k": 4, "q5_k": 4}.get(kind, 0) * 3 * 2
    assert planes_of(kind, weight.blocks, w.shape[1]).nbytes == weight.nbytes + more


@pytest.mark.parametrize(("kind", "shape", "dtype"), pairs("int8", "fp8", "fp8 rows"))
def test_bytes(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """int8 and `fp8 rows`: the rounded rows, exactly but for float32 sums."""
    rows, outputs, units = shape
    kind, fp8_rows = kind.removesuffix(" rows"), kind == "fp8 rows"
    ops = TritonOps(fp8_rows=fp8_rows)
    weight, w = scaled(kind, outputs, 256 * units - 96, rows, dtype)  # not whole groups of 128
    x, bias = random(rows, w.shape[1], seed=1, dtype=dtype), random(outputs, seed=2, dtype=dtype)
    near = x if kind == "fp8" and not fp8_rows else dequantized(*rounded(x, kind))
    check(ops.linear(weight, bias)(x), near, w, bias=bias)
    vocabulary = ops.vocabulary(weight)
    logits = vocabulary.logits(x)
    assert logits.dtype == torch.float32
    check(logits, near, w)
    ids = torch.arange(outputs, device=DEVICE)[::2]
    torch.testing.assert_close(vocabulary.embed(ids).double(), w[ids], rtol=2 * ROUNDING[dtype], atol=1e-7)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    each = codes.shape[1] if scales.shape[1] == 1 and codes.dtype == torch.int8 else GROUP
    return codes.double() * scales.double().repeat_interleave(each, 1)[:, : codes.shape[1]]


@pytest.mark.parametrize("kind", SHARED)
def test_rows_are_rounded_by_the_rule_of_codes(kind: str) -> None:
    """attention/codes.py: the same scales, and the same codes."""
    x = random(5, 1184, seed=3) * torch.tensor([1.0, 1e-3, 30.0, 1e4, 1.0], device=DEVICE)[:, None]
    x[4] = 0
    codes, scales = rounded(x, kind)
    parts = [x] if kind == "int8" else x.split(GROUP, 1)
    expected = [encode_rows(part, codes.dtype) for part in parts]
    assert torch.equal(codes.view(torch.int8), torch.cat([each for each, _ in expected], 1))
    torch.testing.assert_close(scales, torch.cat([each for _, each in expected], 1), rtol=2**-22, atol=0)


@pytest.mark.heavy
def test_the_largest_exact_sum_of_int8() -> None:
    inputs = 1 << 16
    codes = torch.tensor([[127], [-127], [-128]], dtype=torch.int8).expand(3, inputs).contiguous().view(torch.uint8)
    run = OPS.linear(Scaled("int8", codes, torch.full((3, 1), 2.0**-20), torch.float32).to(torch.device(DEVICE)))
    exact = torch.tensor([127, -127, -128], device=DEVICE).double() * 2.0**-4
    found = run(torch.full((2, inputs), -1.0, device=DEVICE)).double()
    torch.testing.assert_close(found, (-exact).expand(2, -1), rtol=2**-21, atol=0)


def test_matrices_of_several_kinds_and_an_order_of_inputs() -> None:
    parts = [quantized(kind, outputs, 512 // BLOCKS[kind][0], outputs, torch.float32)
             for kind, outputs in (("q4_k", 96), ("q8_0", 32), ("q6_k", 70))]  # fmt: skip
    x, w = random(3, 512, seed=3), torch.cat([values for _, values in parts])
    bias = random(198, seed=4)
    run = OPS.linear(stacked([weight for weight, _ in parts]), bias)
    check(run(x) - bias, x, w)
    assert run(x[:0]).shape == (0, 198)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sorted_ = replace(parts[0][0], order=order)
    check(OPS.linear(sorted_)(x), x[:, order], parts[0][1])


def test_splits() -> None:
    """Few programs share inputs; many, or few inputs, do not."""
    assert [splits_for(*each) for each in ((1, 100), (64, 32), (100, 32), (128, 32), (256, 32), (1, 3))] == [
        8, 4, 2, 2, 1, 2,
    ]  # fmt: skip


CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=96,
    vocab_size=50,
    tie_word_embeddings=True,
)
SPARSE = replace(CONFIG, num_experts=3, experts_per_token=2, expert_size=96, normalize_experts=True)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As in engine/checkpoint/weights.py, which needs packages that a bare GPU machine lacks."""
    mlp = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    layer: dict[str, tuple[int, ...]] = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    layer |= dict.fromkeys(("attn_norm", "mlp_norm"), (64,))
    if config.num_experts:
        layer["router"] = (config.num_experts, 64)
        for expert in range(config.num_experts):
            layer |= {f"experts.{expert}.{name}": shape for name, shape in mlp.items()}
    else:
        layer |= mlp
    layers = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    return {"embed": (config.vocab_size, 64), **layers, "norm": (64,)}


def weights_of(config: ModelConfig, kinds: dict[str, str]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """A model's weights with matrices in the type of their name's last part, and all of them in float32."""
    mixed: dict[str, object] = {}
    wide: dict[str, Tensor] = {}
    for seed, (name, shape) in enumerate(shapes(config).items()):
        kind = kinds.get(name.rpartition(".")[2], "")
        if kind in BLOCKS:
            mixed[name], values = quantized(kind, shape[0], shape[1] // BLOCKS[kind][0], seed, torch.float32)
        elif kind:
            mixed[name], values = scaled(kind, *shape, seed, torch.float32)
        else:
            values = torch.ones(shape) if len(shape) == 1 else random(*shape, seed=seed) * 0.1
            mixed[name] = values
        wide[name] = values.to(DEVICE, torch.float32)
    return mixed, wide


GROUPS = dict.fromkeys(("q", "k"), "q4_0") | {"v": "q4_1", "o": "q8_0", "gate": "mxfp4", "up": "mxfp4", "down": "q4_1"}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        pytest.param(CONFIG, GROUPS | {"embed": "q8_0"}, id="groups"),
        pytest.param(SPARSE, GROUPS, id="groups, experts"),
        pytest.param(SPARSE, dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), "fp8"), id="fp8, experts"),
    ],
)
def test_logits_are_those_of_the_widened_model(config: ModelConfig, kinds: dict[str, str]) -> None:
    mixed, wide = weights_of(config, kinds)
    models = [
        Model(config, mixed, TorchBackend(), DEVICE, TritonOps(fp8_rows=False)),
        Model(config, wide, TorchBackend(), DEVICE, TorchOps()),
    ]
    rows = [Row([1, 2, 3, 4, 5], 0, [1, 2]), Row([7], 0, [3])]
    found = []
    for model in models:
        inputs = InputBuilder(16, torch.device(DEVICE)).build(rows)
        pool = torch.full((8, 2, 2, 2, 16, 32), torch.nan, device=DEVICE)
        found.append(model.forward(inputs.token_ids, inputs.batch, pool, inputs.batch.cu_q[1:].long() - 1))
    assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


def test_the_chooser_gives_them_for_quantized_weights_beside_triton_only() -> None:
    for products in ("groups", "bytes"):
        assert isinstance(choose_ops("triton", "cuda", torch.bfloat16, products=products), TritonOps)
        with pytest.raises(NotCompiled, match="the attention backend is torch: on cuda only triton"):
            choose_ops("torch", "cuda", torch.bfloat16, products=products)


def test_weights_follow_the_device() -> None:
    """Every tensor: codes, scales, the order of inputs."""
    weight, _ = quantized("q4_0", 2, 1, 0, torch.float32)
    moved = replace(weight, order=torch.arange(32)).to(torch.device("meta"))
    assert isinstance(moved, Quantized) and moved.order is not None
    assert moved.blocks.is_meta and moved.order.is_meta
    byte = scaled("fp8", 2, 32, 0, torch.float32)[0].to(torch.device("meta"))
    assert byte.codes.is_meta and byte.scales.is_meta

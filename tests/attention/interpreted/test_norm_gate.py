"""Norms and gates against float64, no further from it than twice eager torch of the same type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.ops.choice import choose_ops
from engine.model.ops.interface import TorchOps
from engine.model.ops.triton import TritonOps
from tests.attention.interpreted.cases import DEVICE, DTYPES, assert_close

OURS, TORCH = TritonOps(), TorchOps()
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different size; a row of zeros first."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.tensor([0.0, 1.0, 30.0, 1e-3])[torch.arange(shape[0]) % 4].view(
        -1, *[1] * (len(shape) - 1)
    )
    return x.to(DEVICE, dtype)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 64, 576, 4096, 5000])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = random(9, size, dtype=dtype), random(2, size, dtype=dtype)[1]
    before = x.clone()
    assert_close(OURS.rms_norm(x, weight, EPS), exact_norm(x, weight), TORCH.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)
    strided = random(9, 3 * size, dtype=dtype)[:, size : 2 * size]
    assert_close(OURS.rms_norm(strided, weight, EPS), exact_norm(strided, weight), TORCH.rms_norm(strided, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_inside_a_projection(dtype: torch.dtype) -> None:
    """Qwen3 norms every head of q and k: views of qkv."""
    qkv, weight = random(5, 12, 80, dtype=dtype), random(2, 80, dtype=dtype)[1]
    for part in (qkv[:, :7], qkv[:, 7:10]):
        ours = OURS.rms_norm(part, weight, EPS)
        assert ours.is_contiguous()
        assert_close(ours, exact_norm(part, weight), TORCH.rms_norm(part, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_wide_weight_is_multiplied_before_the_only_rounding(dtype: torch.dtype) -> None:
    x, weight = random(4, 96, dtype=dtype), 1 + random(2, 96, dtype=torch.float32)[1]
    exact = exact_norm(x, weight)
    ours = OURS.rms_norm(x, weight, EPS)
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 5000])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, delta, weight = (
        random(6, size, dtype=dtype),
        random(6, size, dtype=dtype).flip(0).contiguous(),
        random(2, size, dtype=dtype)[1],
    )
    added, plain = TORCH.add_rms_norm(x.clone(), delta.clone(), weight, EPS)
    exact = exact_norm(x.double() + delta.double(), weight)
    ours, normed = OURS.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(ours, added)
    assert_close(normed, exact, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 1024, 1536])
def test_gates(size: int, dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(OURS.silu_mul(gate_up), F.silu(gate) * up, TORCH.silu_mul(gate_up))
    tanh = F.gelu(gate, approximate="tanh") * up
    plain = F.gelu(gate_up[:, :size], approximate="tanh") * gate_up[:, size:]
    assert_close(OURS.gelu_tanh_mul(gate_up), tanh, plain)


def test_gates_of_extreme_values() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, -100.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert OURS.silu_mul(gate_up).tolist() == [[0.0, 2e4, 0.0, 0.0]]
    assert OURS.gelu_tanh_mul(gate_up).tolist() == [[0.0, 2e4, 0.0, 0.0]]


def test_no_rows_and_wrong_shapes() -> None:
    none, weight = torch.zeros(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert OURS.rms_norm(none, weight, EPS).shape == (0, 64) and OURS.silu_mul(none).shape == (0, 32)
    assert OURS.add_rms_norm(none, none.clone(), weight, EPS)[1].shape == (0, 64)
    x = torch.ones(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="norm"):
        OURS.rms_norm(x.T, weight, EPS)
    with pytest.raises(ValueError, match="same shape"):
        OURS.add_rms_norm(x, x[:1], weight, EPS)


def test_the_chooser_gives_them_beside_the_triton_backend() -> None:
    assert isinstance(choose_ops("triton", "cuda", torch.bfloat16), TritonOps)
    assert type(choose_ops("torch", "cuda", torch.bfloat16)) is TorchOps

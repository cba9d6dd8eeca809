"""The operations of a model on a GPU: norms, gates and quantized products are kernels, other products torch's.

attention/triton/norm_gate.py has the kernels of norms and gates, each of which is one launch, and
quantized_triton.py has the products; torch multiplies with cuBLAS. The number of launches determines the
time of a small model's decode step.

TritonOps inherits all other operations from TorchOps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.triton import norm_gate
from engine.model.ops.interface import Linear, TorchOps, Vocabulary
from engine.model.ops.quantized import Mixed, Weight
from engine.model.ops.quantized_triton import Groups, QuantizedLinear, QuantizedVocabulary

FP8_PRODUCTS = (8, 9)
"""The compute capability from which tensor cores multiply fp8."""


class TritonOps(TorchOps):
    """float32, bfloat16, float16 on a GPU (or on the CPU under TRITON_INTERPRET=1, for tests)."""

    name = "triton"

    def __init__(self, *, fp8_rows: bool | None = None) -> None:
        """fp8_rows: rows that meet fp8 weights are rounded to fp8; None = if the current GPU multiplies fp8."""
        if fp8_rows is None:
            fp8_rows = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_PRODUCTS
        self.fp8_rows = fp8_rows

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Tensor):
            return super().linear(weight, bias)
        return QuantizedLinear(weight, bias, fp8_rows=self.fp8_rows)

    def gated_linear(self, weight: Weight, activation: str = "silu") -> Linear:
        if isinstance(weight, Tensor):
            return super().gated_linear(weight, activation)
        gate = {"silu": self.silu_mul, "gelu_tanh": self.gelu_tanh_mul}[activation]
        both = QuantizedLinear(weight, fp8_rows=self.fp8_rows)
        return lambda x: gate(both(x))

    def vocabulary(self, weight: Weight) -> Vocabulary:
        if isinstance(weight, Tensor | Mixed):
            return super().vocabulary(weight)
        return QuantizedVocabulary(weight, fp8_rows=self.fp8_rows)

    def grouped_linear(self, weights: Sequence[Weight]) -> Callable[[Tensor, Tensor], Tensor]:
        if all(isinstance(weight, Tensor) for weight in weights):
            return super().grouped_linear(weights)
        return Groups([self.linear(weight) for weight in weights], weights[0].shape[0])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            norm_gate.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.numel():
            norm_gate.add_rms_norm(x, delta, weight, eps)
        return x, delta

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, gelu=True)

    def _gate_mul(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            norm_gate.gate_mul(gate_up, out, gelu=gelu)
        return out

"""The small operations between attention and the matrix products, one class per kind of hardware.

A model calls these and knows no hardware; an implementation may fuse, prepack and reuse the memory of its arguments
where the docstring allows it. TorchOps runs anywhere and rounds where transformers' Llama does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Ops(Protocol):
    """What a decoder layer needs besides attention. T is the step's tokens, H the hidden size."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """x [T, in] -> x weight^T + bias [T, out], for a weight [out, in] that is prepared here, once."""

    def grouped_linear(self, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """(x [T, in], ends [E] int32) -> [T, out] for weight [E, out, in]: row t is multiplied with the weight of the
        group that ends[g - 1] <= t < ends[g] puts it in; groups may be empty, the last one ends at T."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis, the mean in float32.

        A weight of x's dtype is multiplied with the rounded quotient (Llama); a float32 weight for a narrower x with
        the float32 quotient, and the product is rounded (Gemma)."""

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm); x and delta [T, H], whose memory may be reused for the results."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 I], gate in the first half of a row -> [T, I]."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """The same with gelu in its tanh approximation."""


class TorchOps:
    """Eager torch, any device and float type."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight, bias)

    def grouped_linear(self, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        pad = -weight.shape[2] % (16 // weight.itemsize)  # torch wants rows of whole 16 bytes
        if pad:
            weight = F.pad(weight, (0, pad))
        by_input = weight.transpose(1, 2)  # [E, in, out], a view
        return lambda x, ends: F.grouped_mm(F.pad(x, (0, pad)) if pad else x, by_input, offs=ends)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (wide * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis, the mean in float32."""

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm); x and delta [T, H], whose memory may be reused for the results."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 I], gate in the first half of a row -> [T, I]."""


class TorchOps:
    """Eager torch, any device and float type."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

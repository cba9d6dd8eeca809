"""The small operations between attention and the matrix products, one class per kind of hardware.

A model calls these operations and knows no hardware. An implementation may fuse and prepack, and reuse the memory of
arguments if the docstring allows it. TorchOps runs anywhere and rounds at the same places as transformers' Llama;
it widens quantized weights.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.ops.quantized import Weight, widened

log = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]"""

Tail = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(attended [T, num_heads * head_size], x [T, H]) -> (x after the layer [T, H], the next layer's input). The memory of
both arguments may be reused."""


SHARPNESS = 1.702
"""Of the sigmoid in clamped_mul."""


class PerHead(Protocol):
    """A matrix [in, out] for each head."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, in] -> [T, heads, out], maybe strided; row t of head h is multiplied by matrix h."""

    def one(self, x: Tensor, head: int) -> Tensor:
        """x [T, in] -> [T, out] by the matrix of one head."""

    def back(self, x: Tensor, head: int) -> Tensor:
        """x [T, out] -> [T, in] by the transposed matrix of one head."""


class Vocabulary(Protocol):
    """A matrix with one row per token: the embedding, the head, or both if they are tied."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [T, H] of token_ids [T] int64."""

    def logits(self, x: Tensor) -> Tensor:
        """x [R, H] -> [R, vocab_size] float32."""


class Ops(Protocol):
    """The operations of a decoder layer except attention. T is the step's tokens, H the hidden size."""

    name: str
    """For people."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """x [T, in] -> x weight^T + bias [T, out], for a weight [out, in] that is prepared here, once."""

    def gated_linear(self, weight: Weight, activation: str = "silu") -> Linear:
        """x [T, in] -> act(gate) * up [T, I] with (gate, up) = x weight^T, for a weight [2 I, in], gate's rows first.
        activation: silu, or gelu_tanh for gelu in its tanh approximation."""

    def vocabulary(self, weight: Weight) -> Vocabulary:
        """The vocabulary of a weight [vocab_size, H]."""

    def tail(
        self,
        o: Linear,
        norm: Tensor,
        gate_up: Linear,
        down: Linear,
        next_norm: Tensor,
        eps: float,
        following: Linear | None = None,
    ) -> Tail:
        """A plain layer after attention; o, down and following are from `linear`, gate_up is from `gated_linear`.

        x += o(attended)      x += down(gate_up(rms_norm(x, norm)))      following(rms_norm(x, next_norm))

        `following` is the next layer's first product; None ends with the norm, for the head.
        """

    def grouped_linear(self, weights: Sequence[Weight]) -> Callable[[Tensor, Tensor], Tensor]:
        """(x [T, in], ends [E] int32) -> [T, out] for E weights [out, in]: row t is multiplied by the weight of its
        group g, ends[g - 1] <= t < ends[g]. Groups may be empty; the last one ends at T."""

    def per_head(self, weight: Tensor) -> PerHead:
        """The products with a weight [heads, in, out], in x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis, the mean in float32.

        A weight of x's dtype multiplies the rounded quotient (Llama). A float32 weight for a narrower x multiplies the
        float32 quotient, and the product is rounded (Gemma)."""

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm); x and delta [T, H], whose memory may be reused for the results."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 I], gate in the first half of a row -> [T, I]."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """The same with gelu in its tanh approximation."""

    def clamped_mul(self, gate_up: Tensor, limit: float) -> Tensor:
        """(up + 1) * gate * sigmoid(1.702 gate) with gate cut to at most `limit`, up to [-limit, limit] (gpt-oss)."""


class TorchVocabulary:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()


class TorchPerHead:
    def __init__(self, weight: Tensor) -> None:
        """weight [heads, in, out] in the dtype in which the products are computed."""
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.bmm(x.transpose(0, 1).to(self.weight.dtype), self.weight)
        return product.to(x.dtype).transpose(0, 1)

    def one(self, x: Tensor, head: int) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight[head]).to(x.dtype)

    def back(self, x: Tensor, head: int) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight[head].T).to(x.dtype)


@functools.cache
def faster_in_float32(dtype: torch.dtype) -> bool:
    """Whether torch multiplies stacks of matrices of this dtype slower than the same ones in float32, conversions of
    the smaller factor included: on a CPU without products of 16-bit floats by an order of magnitude."""
    if dtype.itemsize != 2:
        return False
    x, weight = torch.ones(8, 8, 64, dtype=dtype), torch.ones(8, 64, 128, dtype=dtype)
    wide, best = weight.float(), {False: math.inf, True: math.inf}
    for _ in range(4):
        for widened_first in best:
            began = time.perf_counter()
            torch.bmm(x.float(), wide).to(dtype) if widened_first else torch.bmm(x, weight)
            best[widened_first] = min(best[widened_first], time.perf_counter() - began)
    log.info(
        "products of heads in %s: %.0f us as they are, %.0f us in float32, at 8 rows",
        str(dtype).removeprefix("torch."),
        1e6 * best[False],
        1e6 * best[True],
    )
    return best[True] < best[False]


class TorchOps:
    """Eager torch, any device and float type."""

    name = "torch"

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        wide = widened(weight)
        return lambda x: F.linear(x, wide, bias)

    def gated_linear(self, weight: Weight, activation: str = "silu") -> Linear:
        gate = {"silu": self.silu_mul, "gelu_tanh": self.gelu_tanh_mul}[activation]
        wide = widened(weight)
        return lambda x: gate(F.linear(x, wide))

    def vocabulary(self, weight: Weight) -> Vocabulary:
        return TorchVocabulary(widened(weight))

    def tail(
        self,
        o: Linear,
        norm: Tensor,
        gate_up: Linear,
        down: Linear,
        next_norm: Tensor,
        eps: float,
        following: Linear | None = None,
    ) -> Tail:
        def run(attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            x, normed = self.add_rms_norm(x, o(attended), norm, eps)
            x, normed = self.add_rms_norm(x, down(gate_up(normed)), next_norm, eps)
            return x, normed if following is None else following(normed)

        return run

    def grouped_linear(self, weights: Sequence[Weight]) -> Callable[[Tensor, Tensor], Tensor]:
        weight = torch.stack([widened(each) for each in weights])
        pad = -weight.shape[2] % (16 // weight.itemsize)  # torch needs rows of a multiple of 16 bytes
        if pad:
            weight = F.pad(weight, (0, pad))
        by_input = weight.transpose(1, 2)  # [E, in, out], a view
        return lambda x, ends: F.grouped_mm(F.pad(x, (0, pad)) if pad else x, by_input, offs=ends)

    def per_head(self, weight: Tensor) -> PerHead:
        wide = weight.device.type == "cpu" and faster_in_float32(weight.dtype)
        return TorchPerHead(weight.float() if wide else weight)

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

    def clamped_mul(self, gate_up: Tensor, limit: float) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * SHARPNESS))

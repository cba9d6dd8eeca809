"""Mixture of experts: every token passes through its top k of E small MLPs, weighted by a router.

A model may have one more expert, shared by all tokens:

    out[t] = sum over the k chosen e of  weight[t, e] * down_e( act(gate_e x) * up_e x )   (+ shared(x))

or sigmoid(w x) shared(x) (Qwen3-Next), or with a bias in each of the three products of an expert.

routing.py chooses. Rows are sorted by expert, so that all experts are one grouped matrix product over E ragged groups
for any number of tokens; an expert that no token chose costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.experts.routing import Router


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """Called with x [T, H]; returns [T, H]."""

    weight: Tensor  # [1, H]
    expert: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid() * self.expert(x)


@dataclass(frozen=True, slots=True)
class Experts:
    """Called with x [T, H]; returns [T, H]."""

    router: Router
    gate_up: Callable[[Tensor, Tensor], Tensor]  # Ops.grouped_linear of E [2 * expert size, H]
    down: Callable[[Tensor, Tensor], Tensor]  # of E [H, expert size]
    gate: Callable[[Tensor], Tensor]  # Ops.silu_mul or another
    num_experts: int
    experts_per_token: int
    shared: Callable[[Tensor], Tensor] | None = None  # [T, H] -> [T, H]
    biases: tuple[Tensor, Tensor] | None = None  # of gate_up [E, 2 * expert size] and of down [E, H]

    def __call__(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x)  # [T, k] each
        order = chosen.flatten().argsort(stable=True)  # of the T * k (token, expert) pairs, by expert
        ends = chosen.flatten().bincount(minlength=self.num_experts).cumsum(0).to(torch.int32)
        inner = self.gate_up(x[order // self.experts_per_token], ends)
        if self.biases is None:
            out = self.down(self.gate(inner), ends)
        else:
            expert, (of_inner, of_out) = chosen.flatten()[order], self.biases
            out = self.down(self.gate(inner + of_inner[expert]), ends) + of_out[expert]
        by_token: Tensor = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, chosen.shape)
        # Summed in float32; transformers rounds after every expert.
        summed = (by_token.float() * weight[..., None]).sum(1).to(x.dtype)
        return summed if self.shared is None else summed + self.shared(x)

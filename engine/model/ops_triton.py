"""The small operations of a model on a GPU: each norm and each gate is one kernel, matrix products are torch's. The
kernels are in attention/triton/norm_gate.py; torch multiplies with cuBLAS. The number of launches determines the time
of a small model's decode step.

TritonOps inherits all other operations from TorchOps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.triton import norm_gate
from engine.model.ops import TorchOps


class TritonOps(TorchOps):
    """float32, bfloat16, float16 on a GPU (or on the CPU under TRITON_INTERPRET=1, for tests)."""

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

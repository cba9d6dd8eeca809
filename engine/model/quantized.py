"""Matrices in groups of 32 inputs that share a scale, in the bytes of a GGUF tensor.

kind   bytes of a group                          value
q8_0   float16 d, 32 signed bytes q              d q
q4_0   float16 d, 16 bytes: q of inputs i, i+16  d (q - 8)
q4_1   float16 d, float16 m, 16 bytes as q4_0's  d q + m
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
GROUP_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in]; in is a multiple of GROUP."""

    kind: str
    groups: Tensor  # uint8 [out, in / GROUP * GROUP_BYTES[kind]], contiguous
    dtype: torch.dtype  # of what it is multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.groups), self.groups.shape[1] // GROUP_BYTES[self.kind] * GROUP

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes

    def widened(self) -> Tensor:
        """[out, in] in `dtype`; computed in float32."""
        bytes_ = self.groups.view(len(self.groups), -1, GROUP_BYTES[self.kind])

        def half(at: int) -> Tensor:
            return bytes_[..., at : at + 2].contiguous().view(torch.float16).float()

        if self.kind == "q8_0":
            values = half(0) * bytes_[..., 2:].contiguous().view(torch.int8).float()
        else:
            pairs = bytes_[..., -GROUP // 2 :]
            q = torch.cat((pairs & 15, pairs >> 4), -1).float()
            values = half(0) * q + half(2) if self.kind == "q4_1" else half(0) * (q - 8)
        return values.view(self.shape).to(self.dtype)


Weight = Tensor | Quantized
"""A matrix of a model."""


def widened(weight: Weight) -> Tensor:
    return weight.widened() if isinstance(weight, Quantized) else weight


def stacked(parts: Sequence[Weight]) -> Weight:
    """Along the output axis. Raises ValueError for parts of several kinds."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Quantized)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if not quantized:
        return torch.cat(plain)
    if plain or len({part.kind for part in quantized}) > 1:
        raise ValueError("matrices that are multiplied together are stored in several types")
    return Quantized(quantized[0].kind, torch.cat([part.groups for part in quantized]), quantized[0].dtype)

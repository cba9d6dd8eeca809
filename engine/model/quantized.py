"""Matrices in groups of inputs that share a scale, in the bytes of a GGUF tensor.

Blocks run along the inputs. A block is one group of 32 inputs (q8_0, q4_0, q4_1), or 256 inputs in groups of 32 (q4_k,
q5_k) or 16 (q6_k) with integer scales. engine/model/cpu/groups.h has the layouts and the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs of a group of the types to which weights are rounded while loading."""

TOGETHER = (("q", "k", "v"), ("gate", "up"), ("o",), ("down",))
"""Matrices of a layer, as the decoder multiplies them."""

BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Kinds that have kernels -> inputs and bytes of a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in]; in is a multiple of the inputs of a block."""

    kind: str
    blocks: Tensor  # uint8 [out, in / inputs * bytes], contiguous
    dtype: torch.dtype  # of the activations by which it is multiplied
    order: Tensor | None = None  # int64 [in]: the input in each place of a row of blocks; None: 0, 1, 2, ...

    @property
    def shape(self) -> tuple[int, int]:
        inputs, nbytes = BLOCKS[self.kind]
        return len(self.blocks), self.blocks.shape[1] // nbytes * inputs

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def widened(self) -> Tensor:
        """[out, in] in `dtype`; computed in float32."""
        import gguf  # here, because the kernels are tried on machines that have torch and Triton only

        stored = gguf.dequantize(self.blocks.numpy(), gguf.GGMLQuantizationType[self.kind.upper()])
        values = torch.from_numpy(stored).to(self.dtype)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Matrices of several kinds, one below the other, with the same order of inputs."""

    parts: tuple[Quantized, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def order(self) -> Tensor | None:
        return self.parts[0].order

    def widened(self) -> Tensor:
        return torch.cat([part.widened() for part in self.parts])


Weight = Tensor | Quantized | Mixed
"""A matrix of a model."""


def widened(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.widened()


def stacked(parts: Sequence[Weight]) -> Weight:
    """Along the output axis. Quantized parts have the same order of inputs. Raises ValueError for plain parts together
    with quantized ones."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Quantized)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if not quantized:
        return torch.cat(plain)
    if plain:
        raise ValueError("only some of the matrices that are multiplied together are quantized")
    if len({part.kind for part in quantized}) > 1:
        return Mixed(tuple(quantized))
    first = quantized[0]
    return Quantized(first.kind, torch.cat([part.blocks for part in quantized]), first.dtype, first.order)

"""Matrices in 4 to 8 bits, with scales.

Quantized has the bytes of a GGUF tensor: blocks along the inputs. A block is one group of 32 inputs with a scale (q8_0,
q4_0, q4_1, mxfp4), or 256 inputs in groups of 32 (q4_k, q5_k) or 16 (q6_k) with integer scales.
engine/model/cpu/formats.h has the layouts and the values. Scaled has one byte per element and float32 scales
(engine/model/cpu/bytes.h).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32
"""Inputs of a group of the types to which weights are rounded while loading."""

TOGETHER = (("q", "k", "v"), ("q", "kv_a"), ("q_a", "kv_a"), ("q_b",), ("gate", "up"), ("o",), ("down",))
"""Matrices of a layer, as the decoder multiplies them. With a latent (latent.py) others replace q, k and v."""

BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "mxfp4": (32, 17),
}
"""Kinds of Quantized -> inputs and bytes of a block."""

SHARED = {"int8": 0, "fp8": 128}
"""Kinds of Scaled -> inputs that share a scale; 0: all of a row."""

KINDS = frozenset({*BLOCKS, *SHARED})

Products = Literal["elements", "groups", "bytes"]
"""Kernels for matrices of no kind, of Quantized and of Scaled. Each also multiplies matrices of no kind."""


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

    def to(self, device: torch.device) -> Quantized:
        order = None if self.order is None else self.order.to(device)
        return Quantized(self.kind, self.blocks.to(device), self.dtype, order)

    def widened(self) -> Tensor:
        """[out, in] in `dtype`; computed in float32, on a CPU."""
        import gguf  # here, because the kernels are tried on machines that have torch and Triton only

        stored = gguf.dequantize(self.blocks.cpu().numpy(), gguf.GGMLQuantizationType[self.kind.upper()])
        values = torch.from_numpy(stored).to(device=self.blocks.device, dtype=self.dtype)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A matrix [out, in] of codes times scales; in is a multiple of 32. int8: signed, rows of x are rounded to bytes
    too. fp8: e4m3."""

    kind: str
    codes: Tensor  # uint8 [out, in], contiguous
    scales: Tensor  # float32 [out, 1] (int8) or [out, ceil(in / 128)] (fp8), contiguous
    dtype: torch.dtype  # of what it is multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def order(self) -> Tensor | None:
        """None: the inputs are in order."""
        return None

    @classmethod
    def fp8(cls, values: Tensor, dtype: torch.dtype) -> Scaled:
        """A matrix [out, in] rounded to nearest, with one scale for each output."""
        values = values.float()
        scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        codes = (values / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return cls("fp8", codes, scales.repeat(1, -(-codes.shape[1] // SHARED["fp8"])), dtype)

    def to(self, device: torch.device) -> Scaled:
        return Scaled(self.kind, self.codes.to(device), self.scales.to(device), self.dtype)

    def values(self) -> Tensor:
        """[out, in] in float32."""
        codes = self.codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        each = SHARED[self.kind] or codes.shape[1]
        return codes * self.scales.repeat_interleave(each, 1)[:, : codes.shape[1]]

    def widened(self) -> Tensor:
        """[out, in] in `dtype`; computed in float32."""
        return self.values().to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Matrices of several kinds of Quantized, one below the other, with the same order of inputs."""

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


Weight = Tensor | Quantized | Scaled | Mixed
"""A matrix of a model."""


def stored_bytes(shape: Sequence[int], kind: str | None, item_bytes: int) -> int:
    """Of a weight of this shape, in a kind of KINDS or, with None, in elements of `item_bytes`."""
    count = math.prod(shape)
    if kind in BLOCKS:
        inputs, nbytes = BLOCKS[kind]
        return count // inputs * nbytes
    if kind in SHARED:
        scales = -(-shape[1] // SHARED[kind]) if SHARED[kind] else 1
        return count + 4 * shape[0] * scales
    return count * item_bytes


def products_of_kinds(kinds: Iterable[str]) -> Products:
    """The same as products_of, for a model whose quantized matrices are of these kinds."""
    found = set(kinds)
    return "bytes" if found & SHARED.keys() else "groups" if found else "elements"


def products_of(weights: Iterable[Weight]) -> Products:
    """The kernels that multiply all of `weights`; a model has at most one of Quantized and Scaled."""
    types = {type(weight) for weight in weights}
    return "bytes" if Scaled in types else "groups" if types & {Quantized, Mixed} else "elements"


def widened(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.widened()


def stacked(parts: Sequence[Weight]) -> Weight:
    """Along the output axis. Quantized parts have the same order of inputs. Raises ValueError for plain parts together
    with quantized ones, and for Scaled ones of two kinds."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, Tensor)]
    quantized = [part for part in parts if isinstance(part, Quantized)]
    scaled = [part for part in parts if isinstance(part, Scaled)]
    if len(plain) == len(parts):
        return torch.cat(plain)
    if len(scaled) == len(parts) and len({part.kind for part in scaled}) == 1:
        codes, scales = (torch.cat(each) for each in zip(*((part.codes, part.scales) for part in scaled), strict=True))
        return Scaled(scaled[0].kind, codes, scales, scaled[0].dtype)
    if len(quantized) < len(parts):
        raise ValueError("only some of the matrices that are multiplied together are quantized")
    if len({part.kind for part in quantized}) > 1:
        return Mixed(tuple(quantized))
    first = quantized[0]
    return Quantized(first.kind, torch.cat([part.blocks for part in quantized]), first.dtype, first.order)

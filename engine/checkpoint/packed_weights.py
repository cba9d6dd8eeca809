"""PackedWeights: a Hugging Face directory with matrices in 4 bits (engine/checkpoint/hf_quantization.py).

A matrix [out, in] is stored as integers q with zeros z and scales s for every group of inputs: w = s (q - z).

    awq            qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], scales [in / g, out]
                   bits 4 i of an int hold column 0, 2, 4, 6, 1, 3, 5, 7 of its eight for i = 0 .. 7
    gptq           qweight int32 [in / 8, out], qzeros int32 [in / g, out / 8], scales [in / g, out], g_idx int32 [in]
                   bits 4 i hold input or column i; z is the stored number, plus 1 in format "gptq"
                   g_idx: the group of every input. With act-order (desc_act) it is not monotone
    pack-quantized weight_packed int32 [out, in / 8], weight_scale [out, in / g], weight_shape; z = 8

`stored` repacks a matrix once, without widening it, to the groups of 32 that the kernels read
(ops/quantized.py): q4_0 if every z is 8, else q4_1, whose float16 minimum -s z is off by at most 1/128 of a
step s. With act-order the inputs are sorted by their group, and the matrix names their order. `read` gives the values
in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.hf_quantization import Quantization
from engine.checkpoint.safetensors_weights import SafetensorsWeights, names_of, our_name
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.quantized import GROUP, TOGETHER, Quantized

PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
}
"""The tensors of a matrix; the first one has its integers, and gptq may lack the last."""
AWQ_BITS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column c of eight is in the bits from 4 AWQ_BITS[c] on."""
MIDDLE = 8
"""The zero of a symmetric matrix."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix as numbers, its inputs sorted by group."""

    q: Tensor  # uint8 [out, in]
    zeros: Tensor  # int16 [out, in / g]
    scales: Tensor  # [out, in / g]
    order: Tensor | None  # int64 [in]: the input in each place; None: 0, 1, 2, ...

    def values(self) -> Tensor:
        """float32 [out, in], in the order of the model."""
        groups = self.scales.shape[1]
        q = self.q.view(len(self.q), groups, -1).short() - self.zeros[..., None]
        sorted_ = (q * self.scales.float()[..., None]).view(self.q.shape)
        return sorted_ if self.order is None else torch.empty_like(sorted_).index_copy_(1, self.order, sorted_)

    def repacked(self, kind: str, dtype: torch.dtype) -> Quantized:
        """In groups of 32; kind is q4_0 or q4_1."""
        outputs, inputs = self.q.shape
        repeats = inputs // self.scales.shape[1] // GROUP
        numbers = [self.scales.half()]
        if kind == "q4_1":
            numbers.append((-self.scales.float() * self.zeros).half())
        head = torch.stack([each.repeat_interleave(repeats, 1) for each in numbers], -1).view(torch.uint8)
        halves = self.q.view(outputs, -1, 2, GROUP // 2)
        blocks = torch.cat((head, halves[:, :, 0] | halves[:, :, 1] << 4), -1)
        return Quantized(kind, blocks.view(outputs, -1), dtype, self.order)


class PackedWeights(SafetensorsWeights):
    """A weights.Reader; a context manager."""

    def __init__(self, files: Sequence[Path], config: ModelConfig, quantization: Quantization) -> None:
        super().__init__(files, config)
        self._quantization, self._parts = quantization, PARTS[quantization.method]
        self._packed: dict[str, dict[str, tuple[Any, str]]] = {}  # our name -> part -> (open file, its name)
        names = names_of(config)
        for theirs in list(self._where):
            module, _, part = theirs.rpartition(".")
            if part in self._parts:
                self._packed.setdefault(our_name(f"{module}.weight", names), {})[part] = self._where.pop(theirs)
        for name, parts in self._packed.items():
            needed = [part for part in self._parts if part not in ("g_idx", "weight_shape")]
            if lacking := [part for part in needed if part not in parts]:
                raise ModelError(f"{name} lacks its {lacking[0]}, which {quantization.method} needs")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**super().shapes(), **{name: self._shape(parts) for name, parts in self._packed.items()}}

    @cached_property
    def _kind(self) -> str:
        return "q4_0" if all(self._symmetric(parts) for parts in self._packed.values()) else "q4_1"

    def kinds(self) -> Mapping[str, str]:
        """Every weight -> q4_0 or q4_1 if `stored` serves it, else why not."""
        shapes, found = self.shapes(), dict.fromkeys(self._where, "not quantized")
        for name in self._packed:
            found[name] = self._kind if shapes[name][1] % GROUP == 0 else f"{shapes[name][1]} inputs"
        for layer in {name.rpartition(".")[0] for name in self._packed}:
            for together in TOGETHER:
                names = [name for each in together if (name := f"{layer}.{each}") in self._packed]
                orders = [self._order(self._packed[name], shapes[name][1]) for name in names]
                if any(not _equal(order, orders[0]) for order in orders):
                    found |= dict.fromkeys(names, "act-order that differs")
        return found

    def stored(self, name: str, dtype: torch.dtype) -> Quantized:
        """A matrix of kinds(), for products in `dtype`."""
        return self._matrix(name).repacked(self._kind, dtype)

    def read(self, name: str) -> Tensor:
        return self._matrix(name).values() if name in self._packed else super().read(name)

    # --- the formats

    def _shape(self, parts: Mapping[str, tuple[Any, str]]) -> tuple[int, int]:
        file, name = parts[self._parts[0]]
        rows, columns = file.get_slice(name).get_shape()
        method = self._quantization.method
        return {"awq": (8 * columns, rows), "gptq": (columns, 8 * rows)}.get(method, (rows, 8 * columns))

    def _group(self, inputs: int) -> int:
        return inputs if self._quantization.group_size == -1 else self._quantization.group_size

    def _symmetric(self, parts: Mapping[str, tuple[Any, str]]) -> bool:
        return self._quantization.method == "compressed-tensors" or bool((self._zeros(parts) == MIDDLE).all())

    def _zeros(self, parts: Mapping[str, tuple[Any, str]]) -> Tensor:
        """int16 [out, in / g]; not for compressed-tensors."""
        bits = AWQ_BITS if self._quantization.method == "awq" else range(8)
        return (
            _nibbles(_tensor(parts, "qzeros"), bits).flatten(1).T.short() + self._quantization.zero_offset
        ).contiguous()

    def _order(self, parts: Mapping[str, tuple[Any, str]], inputs: int) -> Tensor | None:
        """The input in each place when they are sorted by group; None if they are. Raises ModelError."""
        if "g_idx" not in parts:
            return None
        of, group = _tensor(parts, "g_idx").long(), self._group(inputs)
        sizes = torch.bincount(of.clamp(0, inputs), minlength=inputs // group)
        if of.min() < 0 or len(of) != inputs or not (sizes == group).all() or len(sizes) != inputs // group:
            raise ModelError(f"{parts['g_idx'][1]} does not give {group} inputs to every group: fetch the file again")
        order = of.argsort(stable=True)
        return None if torch.equal(order, torch.arange(inputs)) else order

    def _matrix(self, name: str) -> Packed:
        """Raises ModelError for parts whose shapes do not fit."""
        parts, method = self._packed[name], self._quantization.method
        outputs, inputs = self._shape(parts)
        shape = outputs, inputs // self._group(inputs)
        if method == "compressed-tensors":
            q, scales = _nibbles(_tensor(parts, "weight_packed"), range(8)).flatten(1), _tensor(parts, "weight_scale")
            zeros, order = torch.full(shape, MIDDLE, dtype=torch.int16), None
        else:
            packed, scales = _tensor(parts, "qweight"), _tensor(parts, "scales").T.contiguous()
            q = _nibbles(packed, AWQ_BITS).flatten(1).T if method == "awq" else _nibbles(packed.T, range(8)).flatten(1)
            zeros, order = self._zeros(parts), self._order(parts, inputs)
        if scales.shape != shape or zeros.shape != shape or inputs % self._group(inputs):
            raise ModelError(
                f"{name} has scales {list(scales.shape)} and zeros {list(zeros.shape)}, not {list(shape)} as "
                "quantization_config.group_size says"
            )
        if order is not None:
            q = q[:, order]
        return Packed(q.contiguous(), zeros, scales, order)


def _tensor(parts: Mapping[str, tuple[Any, str]], part: str) -> Tensor:
    file, name = parts[part]
    tensor: Tensor = file.get_tensor(name)
    return tensor


def _nibbles(ints: Tensor, bits: Sequence[int]) -> Tensor:
    """int32 [rows, columns] -> uint8 [rows, columns, 8]: the four bits from 4 bits[i] on."""
    return (ints[..., None] >> torch.tensor([4 * each for each in bits], dtype=torch.int32) & 15).to(torch.uint8)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)

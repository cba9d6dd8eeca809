"""Mxfp4Weights: a Hugging Face directory with matrices in MXFP4 (engine/checkpoint/hf_quantization.py).

A matrix [out, in] is stored as codes of 4 bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) and a power of
two for 32 inputs (E8M0: 2^(s - 127)). Byte i of a group has input 2 i in its low half and input 2 i + 1 in the high
one.

    mxfp4                  P_blocks uint8 [..., out, in / 32, 16], P_scales uint8 [..., out, in / 32] of a parameter P:
                           X.weight, or all experts together: experts.gate_up_proj [E, ...], whose rows are those of the
                           gate and then those of up (in gpt-oss in turns), and experts.down_proj [E, ...]
    mxfp4-pack-quantized   X.weight_packed uint8 [out, in / 2], X.weight_scale uint8 [out, in / 32]

`stored` gives the blocks of GGUF's type MXFP4 (ops/quantized.py), which have the same bits in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.hf_quantization import Mxfp4Quantization
from engine.checkpoint.safetensors_weights import SafetensorsWeights, names_of, our_name
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.quantized import GROUP, Quantized

ENDS = {"mxfp4": ("_blocks", "_scales"), "compressed-tensors": (".weight_packed", ".weight_scale")}
"""Method -> ends of the names of codes and scales."""

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""Parameters of all experts."""

NOT_FINITE = 255
"""The scale that means NaN."""


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix in the two tensors of a parameter."""

    codes: tuple[Any, str]  # open file, name
    scales: tuple[Any, str]
    expert: int | None = None
    first: int = 0  # row
    rows: int | None = None  # None: all
    step: int = 1  # between two rows

    def read(self, tensor: tuple[Any, str]) -> Tensor:
        """The matrix's part of one of the two, and nothing else of it."""
        file, name = tensor
        whole = file.get_slice(name)
        if self.step > 1:
            of_expert: Tensor = whole[self.expert]
            return of_expert[self.first :: self.step]
        rows = slice(self.first, None if self.rows is None else self.first + self.rows)
        part: Tensor = whole[rows] if self.expert is None else whole[self.expert, rows]
        return part

    @property
    def shape(self) -> tuple[int, int]:
        outputs, groups = shape_of(self.scales)[-2:]
        return outputs if self.rows is None else self.rows, groups * GROUP


class Mxfp4Weights(SafetensorsWeights):
    """A weights.Reader; a context manager."""

    def __init__(self, files: Sequence[Path], config: ModelConfig, quantization: Mxfp4Quantization) -> None:
        super().__init__(files, config)
        self._names = names_of(config)
        self._in_turns = config.together
        self._places: dict[str, Place] = {}
        ends = ENDS[quantization.method]
        found: dict[str, dict[str, tuple[Any, str]]] = {}  # parameter -> end -> open file, name
        for theirs in list(self._where):
            end = next((each for each in ends if theirs.endswith(each)), None)
            if end is not None:
                found.setdefault(theirs.removesuffix(end), {})[end] = self._where.pop(theirs)
        for parameter, parts in found.items():
            if lacking := [end for end in ends if end not in parts]:
                raise ModelError(f"{parameter} lacks its {parameter}{lacking[0]}: fetch the file again")
            codes, scales = (parts[end] for end in ends)
            check_shapes(parameter, codes, scales, split=quantization.method == "mxfp4")
            self._add(parameter, codes, scales)

    def _add(self, parameter: str, codes: tuple[Any, str], scales: tuple[Any, str]) -> None:
        """Its matrices under our names."""
        if not parameter.endswith((GATE_UP, DOWN)):
            weight = parameter.removesuffix(".weight") + ".weight"
            self._places[our_name(weight, self._names)] = Place(codes, scales)
            return
        experts, rows, _ = shape_of(scales)
        layer = parameter.split(".")[2]
        for expert in range(experts):
            at = f"layers.{layer}.experts.{expert}."
            if parameter.endswith(DOWN):
                self._places[at + "down"] = Place(codes, scales, expert)
            elif self._in_turns:
                self._places[at + "gate"] = Place(codes, scales, expert, 0, rows // 2, 2)
                self._places[at + "up"] = Place(codes, scales, expert, 1, rows // 2, 2)
            else:
                self._places[at + "gate"] = Place(codes, scales, expert, 0, rows // 2)
                self._places[at + "up"] = Place(codes, scales, expert, rows // 2, rows // 2)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**super().shapes(), **{name: place.shape for name, place in self._places.items()}}

    def kinds(self) -> Mapping[str, str]:
        """Every weight -> mxfp4, or why not."""
        return dict.fromkeys((*self._where, *self._joined), "not quantized") | dict.fromkeys(self._places, "mxfp4")

    def stored(self, name: str, dtype: torch.dtype) -> Quantized:
        """A matrix of kinds(), for products in `dtype`. Raises ModelError for damaged scales."""
        place = self._places[name]
        scales = place.read(place.scales)
        if bool((scales == NOT_FINITE).any()):
            raise ModelError(f"{place.scales[1]} has numbers that are not finite: fetch the file again")
        codes = place.read(place.codes).reshape(*scales.shape, GROUP // 2)
        return Quantized("mxfp4", blocks_of(codes, scales), dtype)

    def read(self, name: str) -> Tensor:
        return self.stored(name, torch.float32).widened() if name in self._places else super().read(name)


def blocks_of(codes: Tensor, scales: Tensor) -> Tensor:
    """codes uint8 [out, groups, 16], scales uint8 [out, groups] -> GGUF's blocks uint8 [out, groups * 17], where byte i
    of a group has the inputs i and i + 16."""
    in_order = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # [out, groups, 32]
    low, high = in_order.chunk(2, -1)
    return torch.cat((scales[..., None], low | high << 4), -1).flatten(1)


def shape_of(tensor: tuple[Any, str]) -> tuple[int, ...]:
    file, name = tensor
    return tuple(file.get_slice(name).get_shape())


def check_shapes(parameter: str, codes: tuple[Any, str], scales: tuple[Any, str], *, split: bool) -> None:
    """Raises ModelError. split: codes have an axis of groups."""
    for file, name in (codes, scales):
        if (found := file.get_slice(name).get_dtype()) != "U8":
            raise ModelError(f"{name} is of type {found}, not U8 as quantization_config says")
    of_all = parameter.endswith((GATE_UP, DOWN))
    has, needs = shape_of(codes), shape_of(scales)
    wanted = (*needs, GROUP // 2) if split else (*needs[:-1], needs[-1] * GROUP // 2)
    if len(needs) != (3 if of_all else 2) or has != wanted or (parameter.endswith(GATE_UP) and needs[1] % 2):
        raise ModelError(
            f"{parameter} has codes {list(has)} and scales {list(needs)}, which are not bytes of two inputs and a "
            f"scale for {GROUP} inputs"
        )

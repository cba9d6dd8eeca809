"""ByteWeights: a Hugging Face directory with matrices in bytes (engine/checkpoint/hf_quantization.py).

A matrix [out, in] is stored as codes q, signed bytes (int8) or e4m3 (fp8), and as scales s that multiply them: w = s q.

    weight                              int8 or float8_e4m3fn [out, in]
    weight_scale, weight_scale_inv      one number; [out, 1]; or [ceil(out / 128), ceil(in / 128)]

`stored` gives the codes as they are, with scales in float32, repeated for each output (engine/model/ops/quantized.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.hf_quantization import ByteQuantization
from engine.checkpoint.safetensors_weights import SafetensorsWeights, names_of, our_name
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.quantized import GROUP, SHARED, Scaled

SCALES = ("weight_scale", "weight_scale_inv")
ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")
"""Rows of activations are rounded by their own largest number, or not at all."""

CODES = {"int8": "I8", "fp8": "F8_E4M3"}
"""Kind -> type of the codes as safetensors spells it."""

BLOCK = 128
MOST_INPUTS = {"int8": 1 << 16, "fp8": 1 << 30}
"""A sum of more products of bytes may exceed int32."""


class ByteWeights(SafetensorsWeights):
    """A weights.Reader; a context manager."""

    def __init__(self, files: Sequence[Path], config: ModelConfig, quantization: ByteQuantization) -> None:
        super().__init__(files, config)
        self._kind, self._strategy = quantization.kind, quantization.strategy
        self._scales: dict[str, tuple[Any, str]] = {}  # our name of the matrix -> open file, name of the scales
        names = names_of(config)
        for theirs in list(self._where):
            module, _, part = theirs.rpartition(".")
            if part in SCALES:
                self._scales[our_name(f"{module}.weight", names)] = self._where.pop(theirs)
            elif part in ACTIVATIONS:
                del self._where[theirs]
        for name, (file, theirs) in self._where.items():
            found = file.get_slice(theirs).get_dtype()
            if (name in self._scales) != (found in CODES.values()):
                lacking = "has no weight_scale" if name not in self._scales else "has a weight_scale"
                raise ModelError(f"{theirs} of type {found} {lacking}: fetch the file again")
            if name in self._scales and found != CODES[self._kind]:
                raise ModelError(f"{theirs} is of type {found}, not {self._kind} as quantization_config says")
        if lost := [theirs for name, (_, theirs) in self._scales.items() if name not in self._where]:
            raise ModelError(f"{lost[0]} has no weight: fetch the file again")

    def kinds(self) -> Mapping[str, str]:
        """Every weight -> int8 or fp8 if `stored` serves it, else why not."""
        found = dict.fromkeys(self._where, "not quantized")
        for name, shape in self.shapes().items():
            if name in self._scales:
                served = shape[1] % GROUP == 0 and shape[1] <= MOST_INPUTS[self._kind]
                found[name] = self._kind if served else f"{shape[1]} inputs"
        return found

    def stored(self, name: str, dtype: torch.dtype) -> Scaled:
        """A matrix of kinds(), for products in `dtype`. Raises ModelError for damaged codes or scales."""
        codes = self._whole(name).clone().view(torch.uint8)
        file, theirs = self._scales[name]
        scales: Tensor = file.get_tensor(theirs).float()
        if not scales.isfinite().all():
            raise ModelError(f"{theirs} has numbers that are not finite: fetch the file again")
        if self._kind == "fp8" and bool(((codes & 0x7F) == 0x7F).any()):
            raise ModelError(f"{self._where[name][1]} has numbers that are not finite: fetch the file again")
        return Scaled(self._kind, codes, self._for_outputs(scales, tuple(codes.shape), theirs), dtype)

    def read(self, name: str) -> Tensor:
        return self.stored(name, torch.float32).values() if name in self._scales else super().read(name)

    def _for_outputs(self, scales: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
        """float32 [out, 1] (int8) or [out, ceil(in / 128)] (fp8) for a matrix of `shape`. Raises ModelError."""
        (outputs, inputs), shared = shape, SHARED[self._kind]
        groups = -(-inputs // shared) if shared else 1
        served = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((outputs, 1), (outputs,)),
            "block": ((-(-outputs // BLOCK), -(-inputs // BLOCK)),),
        }[self._strategy]
        if tuple(scales.shape) not in served:
            raise ModelError(
                f"{name} has shape {list(scales.shape)}, which is not one scale for each {self._strategy} of "
                f"{list(shape)}, as quantization_config says"
            )
        if self._strategy == "block":
            return scales.repeat_interleave(BLOCK, 0)[:outputs].contiguous()
        return scales.reshape(-1, 1).expand(outputs, groups).contiguous()

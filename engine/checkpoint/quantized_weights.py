"""load_quantized(): a model's weights with matrices in 4 to 8 bits (--weight-dtype).

    stored   a matrix as it is in a GGUF file, or in a checkpoint in 4 bits (packed_weights.py, mxfp4_weights.py) or in
             bytes (byte_weights.py), if there is a kernel (ops/quantized.py) for its type and for the types of
             all matrices of the same product; other matrices are widened
    int8     any checkpoint, to q8_0 while loading
    int4     any checkpoint, to q4_1 while loading; embed and lm_head to q8_0
    fp8      any checkpoint, to fp8 while loading; not embed and lm_head
    mxfp4    any checkpoint, to mxfp4 while loading; embed and lm_head to q8_0

Nothing is kept in the cache of converted weights: `stored` converts nothing. Norms, biases and routers are in the type
of the computation.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from engine.checkpoint.gguf.weights import GGUFWeights
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.weights import Reader, open_quantized, open_weights, read_all, shapes, type_of
from engine.model.model_error import ModelError
from engine.model.ops.quantized import GROUP, KINDS, TOGETHER, Quantized, Scaled, Weight

log = logging.getLogger("mooncake.engine")

VOCABULARY = ("embed", "lm_head")
OUTPUTS = 32
"""The largest block of outputs of a kernel (engine/model/cpu/gemm_any.h)."""


WHILE_LOADING = {"int8": ("q8_0", "q8_0"), "int4": ("q4_1", "q8_0"), "fp8": ("fp8", ""), "mxfp4": ("mxfp4", "q8_0")}
"""--weight-dtype -> kinds of a layer's matrices and of embed and lm_head; "": as --dtype."""


class StoredReader(Reader, Protocol):
    """Weights of which some are quantized; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def kinds(self) -> Mapping[str, str]:
        """Every weight -> a kind of ops/quantized.py that `stored` gives, or its type or why there is none."""

    def stored(self, name: str, dtype: torch.dtype) -> Quantized | Scaled:
        """A matrix as it is stored, for products in `dtype`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the weights of a model are read, one by one, for --weight-dtype."""

    opened: AbstractContextManager[Any]  # -> a Reader
    take: Callable[[Any, str], Weight]  # (reader, name) -> a matrix as Quantized or Scaled, or a tensor
    kinds: Mapping[str, str]  # of the matrices that are Quantized or Scaled


def load_quantized(
    source: ModelSource,
    weight_dtype: str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    opened: AbstractContextManager[Reader] | None = None,
) -> dict[str, Weight]:
    """All weights on the CPU: matrices as Quantized or Scaled for products in `dtype`, others in `dtype`. `progress`
    and `opened` as weights.load has them; nothing is `stored` in the latter. Raises ModelError, also for a model or a
    file that --weight-dtype cannot serve."""
    reading = reading_of(source, weight_dtype, dtype, opened)
    weights = read_all(source, reading.opened, reading.take, dtype, progress)
    found = [weight for weight in weights.values() if isinstance(weight, Quantized | Scaled)]
    log.info(
        "%d weight matrices in %s: %d MB, %d MB in %s",
        len(found),
        " and ".join(sorted({weight.kind for weight in found})),
        sum(weight.nbytes for weight in found) >> 20,
        sum(math.prod(weight.shape) for weight in found) * dtype.itemsize >> 20,
        str(dtype).removeprefix("torch."),
    )
    return weights


def reading_of(
    source: ModelSource,
    weight_dtype: str,
    dtype: torch.dtype,
    opened: AbstractContextManager[Reader] | None = None,
) -> Reading:
    """`weight_dtype` also wide: everything in `dtype`. Other arguments and errors as load_quantized has them."""
    if weight_dtype == "stored":
        return _as_stored(source, dtype)
    opened = opened or open_weights(source, dtype, None)
    if weight_dtype == "wide":
        return Reading(opened, partial(_widened, dtype=dtype), {})
    return _quantize_all(source, weight_dtype, dtype, opened)


def _as_stored(source: ModelSource, dtype: torch.dtype) -> Reading:
    file = open_stored(source)
    if file is None:
        raise ModelError(
            f"--weight-dtype stored: {source.name} is not a GGUF file, nor a checkpoint with a quantization_config; "
            "use int8, int4, fp8, mxfp4 or auto"
        )
    found = file.kinds()
    kinds = kept(found, file.shapes())
    _report({name: found[name] for name in matrices(found) if name not in kinds}, dtype)

    def take(reader: StoredReader, name: str) -> Weight:
        return reader.stored(name, dtype) if name in kinds else _widened(reader, name, dtype)

    return Reading(file, take, {name: found[name] for name in kinds})


def _widened(reader: Reader, name: str, dtype: torch.dtype) -> Tensor:
    return reader.read(name).to(type_of(name, dtype)).contiguous()


def open_stored(source: ModelSource) -> StoredReader | None:
    """The weights of a model whose files may have quantized matrices; None if they have none. Raises ModelError."""
    if source.format == "gguf":
        return GGUFWeights(source.path, source.config)
    return open_quantized(source) if source.format == "safetensors" else None


def _quantize_all(
    source: ModelSource, weight_dtype: str, dtype: torch.dtype, opened: AbstractContextManager[Reader]
) -> Reading:
    wanted = shapes(source.config)
    of_layers, of_vocabulary = WHILE_LOADING[weight_dtype]
    to = {name: of_vocabulary if name in VOCABULARY else of_layers for name in matrices(wanted)}
    kinds = {name: kind for name, kind in to.items() if kind and wanted[name][1] % GROUP == 0}
    _report({name: f"{wanted[name][1]} inputs" for name, kind in to.items() if kind and name not in kinds}, dtype)

    def take(reader: Reader, name: str) -> Weight:
        return quantized(reader.read(name), kinds[name], dtype) if name in kinds else _widened(reader, name, dtype)

    return Reading(opened, take, kinds)


def matrices(names: Mapping[str, object]) -> list[str]:
    """Names of weights that may be quantized: not q, k and v of Kimi Linear's states, which are multiplied together
    with small matrices."""
    kinds = {name for group in TOGETHER for name in group}

    def may(name: str) -> bool:
        layer, _, kind = name.rpartition(".")
        return kind in kinds and not (kind in ("q", "k", "v") and f"{layer}.f_a" in names)

    return [name for name in names if name in VOCABULARY or may(name)]


def kept(found: Mapping[str, str], sizes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of the matrices that stay as they are stored. `found`: every weight -> its type in the file; `sizes`: its
    shape."""
    names = {name for name in VOCABULARY if found.get(name) in KINDS}
    for layer in {name.rpartition(".")[0] for name in found if name.startswith("layers.")}:
        for group in TOGETHER:
            together = [f"{layer}.{name}" for name in group]
            types = {found.get(name, "") for name in together}
            if not types <= KINDS:
                continue
            # q, k and v may be of several types, if each is whole blocks of the kernels.
            if len(types) == 1 or (group[0] == "q" and not any(sizes[name][0] % OUTPUTS for name in together)):
                names.update(together)
    return names


def quantized(values: Tensor, kind: str, dtype: torch.dtype) -> Quantized | Scaled:
    """A matrix [out, in] rounded to nearest: in groups of 32, or to fp8."""
    if kind == "fp8":
        return Scaled.fp8(values, dtype)
    rows = gguf.quantize(np.ascontiguousarray(values.float().numpy()), GGMLQuantizationType[kind.upper()])
    return Quantized(kind, torch.from_numpy(rows), dtype)


def _report(left: Mapping[str, str], dtype: torch.dtype) -> None:
    """Says which matrices are computed in `dtype`, by the reason."""
    for reason, count in Counter(left.values()).items():
        names = [name for name in left if left[name] == reason]
        log.warning(
            "%d matrices (%s) are widened to %s: %s%s",
            count,
            reason,
            str(dtype).removeprefix("torch."),
            ", ".join(names[:3]),
            " ..." if count > 3 else "",
        )

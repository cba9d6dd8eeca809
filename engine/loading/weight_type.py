"""Decides what --weight-dtype auto means for one model on this machine: `stored` or `wide`, with the reason in the log.

On a CPU a measurement decides, if the files have matrices in types that have kernels (GGUF, AWQ, GPTQ, int8, fp8,
mxfp4), and the `cpu` backend computes attention, not torch on request. Products with matrices of these types and of the
model's own shapes, and the same products with wide ones, by our kernels and by torch, take turns for 1, 8 and 128 rows
of x (engine/model/ops/choice.py). `stored` wins unless wide is faster by more than NOISE: it needs less memory, and
starts of one node agree. The measurement takes about a tenth of a second. Where tiles (amx) multiply wide matrices, a
first start compiles the kernels of both.

A node that joins a cluster takes what the cluster's nodes take, if it can, and measures nothing: rows that meet integer
weights are rounded, so tokens with nearly equal logits may differ between `stored` and `wide`.

On a GPU `stored` for every file with such matrices, if Triton computes attention: who gives a node a quantized
checkpoint expects its memory to hold no wider one. No GPU has measured these products yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from attention.choice.quiet import undisturbed
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import VOCABULARY, kept, open_stored
from engine.model.ops.choice import ROWS, in_words, name_of, seconds_of
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import Ops, TorchOps
from engine.model.ops.quantized import constant, products_of_kinds
from net.compiled import NotCompiled

log = logging.getLogger("mooncake.engine")

ELEMENTS = 1 << 21
"""The most elements of all measured matrices of one candidate: a product of 128 rows then takes milliseconds."""
OUTPUTS = 64
"""The fewest outputs of a measured matrix; more are a multiple of it."""
NOISE = 1.2
"""Ratio of the products of the times for ROWS."""

Shapes = Mapping[str, tuple[int, int]]


def weight_type(
    source: ModelSource, backend: str, dtype: torch.dtype, cpu_level: str, agreed: str | None = None
) -> str:
    """`backend`: the name of the attention backend; `dtype`: of the computation; `cpu_level` as --cpu-level; `agreed`:
    what the cluster takes. Raises ModelError for an unreadable file."""
    opened = open_stored(source)
    if opened is None:
        return "wide"
    with opened as file:
        found, sizes = file.kinds(), file.shapes()
    kinds = {name: found[name] for name in sorted(kept(found, sizes))}
    if agreed == "wide" and kinds:
        chosen, why = "wide", "the cluster's nodes widen these weights"
    elif (reason := _obstacle(kinds, backend)) is not None:
        chosen, why = "wide", reason
    elif backend == "triton":
        named = " and ".join(sorted(set(kinds.values())))
        chosen, why = "stored", f"Triton has products of {named}; wide gives {dtype}"
    else:
        chosen, why = _on_cpu(kinds, sizes, dtype, cpu_level, agreed)
    log.info("--weight-dtype auto: %s, because %s", chosen, why)
    return chosen


def _obstacle(kinds: Mapping[str, str], backend: str) -> str | None:
    """Why weights in `kinds` (matrix -> kind) cannot stay as they are stored; None if they can."""
    if not kinds:
        return "the file has no matrices in types with kernels"
    return None if backend in ("cpu", "triton") else f"the attention backend is {backend}, not cpu"


def _on_cpu(
    kinds: Mapping[str, str],
    sizes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    cpu_level: str,
    agreed: str | None,
) -> tuple[str, str]:
    """The choice and its reason."""
    try:
        stored = CpuOps(cpu_level, dtype, products_of_kinds(kinds.values()))
        if agreed == "stored":
            return "stored", "the cluster's nodes take these weights as they are stored"
        wide: list[Ops] = [CpuOps(cpu_level, dtype), TorchOps()]
    except NotCompiled as error:
        return "wide", str(error)
    shapes = measured_shapes(kinds, sizes)
    elements = weights_of_kinds(kinds, sizes)
    (ours, *others), threads = undisturbed(lambda check: times_of(stored, wide, shapes, elements, dtype, check))
    told = "; ".join(f"{in_words(each)} by {name_of(ops)}" for ops, each in zip(wide, others, strict=True))
    name, ratio = str(dtype).removeprefix("torch."), math.prod(ours) / min(map(math.prod, others))
    chosen, why = ("stored", "no slower") if ratio <= NOISE else ("wide", f"faster in {name}")
    measured = " and ".join(f"{kind} [{n}, {k}]" for kind, (n, k) in sorted(shapes.items()))
    return chosen, (
        f"products are {why}: those of all layers take {in_words(ours)} by {name_of(stored)}; in {name} {told}; "
        f"measured with {measured}, {threads} threads"
    )


def counted(kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """Kind -> its matrices in the layers. The vocabulary counts only if nothing else is quantized: a step needs the
    logits of few rows."""
    found: dict[str, list[str]] = {}
    for name in [name for name in kinds if name not in VOCABULARY] or list(kinds):
        found.setdefault(kinds[name], []).append(name)
    return found


def weights_of_kinds(kinds: Mapping[str, str], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Kind -> elements of its matrices that count."""
    return {kind: sum(math.prod(sizes[name]) for name in names) for kind, names in counted(kinds).items()}


def measured_shapes(kinds: Mapping[str, str], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Kind -> the shape of its largest matrix that counts, with as many outputs as ELEMENTS permits."""
    found, of_each = {}, counted(kinds)
    for kind, names in of_each.items():
        outputs, inputs = max((sizes[name][-2:] for name in names), key=math.prod)
        most = ELEMENTS // len(of_each) // inputs // OUTPUTS * OUTPUTS
        found[kind] = (min(outputs, max(most, OUTPUTS)), inputs)
    return found


def times_of(
    stored: Ops,
    wide: Sequence[Ops],
    shapes: Shapes,
    elements: Mapping[str, int],
    dtype: torch.dtype,
    check: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Seconds for ROWS of products with all matrices that count: as they are stored, then by each of `wide`. One of a
    kind is measured; the time of the others follows from their `elements`. Calls `check` after each round."""
    total = [[0.0] * len(ROWS) for _ in (stored, *wide)]
    for kind, shape in shapes.items():
        plain = torch.full(shape, 0.5, dtype=dtype)
        measured = seconds_of([stored, *wide], [constant(kind, shape, dtype), *[plain] * len(wide)], check)
        for row, each in zip(total, measured, strict=True):
            for column, took in enumerate(each):
                row[column] += took * elements[kind] / math.prod(shape)
    return total

"""Decides what --weight-dtype auto means for one model on this machine: `stored` or `wide`, with the reason in the log.

On a CPU `stored` where all of these hold: the files have matrices in types that have kernels (GGUF, AWQ, GPTQ, int8,
fp8, mxfp4); the `cpu` backend computes attention, not torch on request; and the products of this CPU's level are faster
with these matrices for one row and for many. The last is so at FASTER: `scripts/bench.py ops --only quantized` measures
it. Tiles (amx) multiply many rows of bfloat16 faster than any level multiplies bytes. No ARM CPU has measured its
products of bytes yet.

fp8 is measured at the start, next to products of widened matrices by our kernels and by torch, because the type of the
computation decides. Against float32, in which CPUs without bfloat16 compute, its four times fewer bytes win; against
bfloat16 the conversion of each byte may cost more than it saves. Each candidate multiplies COPIES of a matrix, which
exceed most caches, as those of a model do. `stored` wins unless wide is faster by more than NOISE, because it needs a
half or a quarter of the memory. Rows that meet fp8 are not rounded.

On a GPU `stored` for every file with such matrices, if Triton computes attention: who gives a node a quantized
checkpoint expects its memory to hold no wider one. No GPU has measured these products yet.

For other types the choice depends on the file, the CPU and the backend alone, so every start of a node gives the same
tokens: rows that meet integer weights are rounded, so tokens with nearly equal logits may differ between `stored` and
`wide`. For the same reason a node that joins a cluster takes what the cluster's nodes take, if it can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence, Set

import torch

from attention.choice.quiet import undisturbed
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import kept, open_stored
from engine.model.ops.choice import INPUTS, NOISE, OUTPUTS, in_words, name_of, seconds_of
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import Ops, TorchOps
from engine.model.ops.quantized import Scaled, products_of_kinds
from net.compiled import NotCompiled

log = logging.getLogger("mooncake.engine")

FASTER = ("avx512_bf16", "avx512_vnni", "avx512", "avx2")
"""Levels of attention/cpu/level.py."""

COPIES = 16
"""32 MB of fp8, and 64 or 128 MB of widened matrices."""


def weight_type(
    source: ModelSource, backend: str, dtype: torch.dtype, cpu_level: str, agreed: str | None = None
) -> str:
    """`backend`: the name of the attention backend; `dtype`: of the computation; `cpu_level` as --cpu-level; `agreed`:
    what the cluster takes. Raises ModelError for an unreadable file."""
    opened = open_stored(source)
    if opened is None:
        return "wide"
    with opened as file:
        found = file.kinds()
        kinds = {found[name] for name in kept(found, file.shapes())}
    chosen, why = _choice(kinds, backend, dtype, cpu_level, agreed)
    log.info("--weight-dtype auto: %s, because %s", chosen, why)
    return chosen


def _choice(kinds: Set[str], backend: str, dtype: torch.dtype, cpu_level: str, agreed: str | None) -> tuple[str, str]:
    """`stored` or `wide` for weights in `kinds`, and why."""
    if not kinds:
        return "wide", "the file has no matrices in types with kernels"
    if agreed == "wide":
        return "wide", "the cluster's nodes widen these weights"
    if backend not in ("cpu", "triton"):
        return "wide", f"the attention backend is {backend}, not cpu"
    named = " and ".join(sorted(kinds))
    kept_as_stored = "stored", "the cluster's nodes take these weights as they are stored"
    if backend == "triton":
        return (
            kept_as_stored if agreed == "stored" else ("stored", f"Triton has products of {named}; wide gives {dtype}")
        )
    try:
        ops = CpuOps(cpu_level, dtype, products_of_kinds(kinds))
        if agreed == "stored":
            return kept_as_stored
        if "fp8" in kinds:
            ours = CpuOps(cpu_level, dtype) if ops.level == "amx" else ops  # they multiply wide matrices as well
            return measured_fp8(ops, [ours, TorchOps()], dtype)
    except NotCompiled as error:
        return "wide", str(error)
    if ops.level in FASTER:
        return "stored", f"products are faster with {named}; wide gives {dtype}"
    return "wide", f"products of level {ops.level} are faster in {str(dtype).removeprefix('torch.')}"


def measured_fp8(stored: Ops, wide: Sequence[Ops], dtype: torch.dtype) -> tuple[str, str]:
    """`stored` or `wide` for fp8 by the times of products with copies of one matrix, and why."""
    plain = torch.full((OUTPUTS, INPUTS), 0.5, dtype=dtype)
    narrow = Scaled.fp8(plain, dtype)
    linears = [[stored.linear(narrow) for _ in range(COPIES)]]
    linears += [[ops.linear(plain.clone()) for _ in range(COPIES)] for ops in wide]  # torch keeps the tensor itself
    (ours, *others), threads = undisturbed(lambda check: seconds_of(linears, INPUTS, dtype, check))
    name, slower = str(dtype).removeprefix("torch."), math.prod(ours) > NOISE * min(map(math.prod, others))
    told = "; ".join(f"{in_words(each)} by {name_of(ops)}" for ops, each in zip(wide, others, strict=True))
    return "wide" if slower else "stored", (
        f"products of fp8 are {'slower' if slower else 'no slower'}: {in_words(ours)}; in {name} {told}; "
        f"measured with {COPIES} matrices [{OUTPUTS}, {INPUTS}], {threads} threads"
    )

"""Decides what --weight-dtype auto means for one model on this machine: `stored` or `wide`, with the reason in the log.

On a CPU `stored` where all of these hold: the files have matrices in types that have kernels (GGUF, AWQ, GPTQ, int8,
fp8, mxfp4); the `cpu` backend computes attention, not torch on request; and the products of this CPU's level are faster
with these matrices for one row and for many. The last is so at FASTER: `scripts/bench.py ops --only quantized` measures
it. fp8 is faster for one row, but slower for 2 to 32, because each conversion serves few rows. Tiles (amx) multiply
many rows of bfloat16 faster than any level multiplies bytes. No ARM CPU has measured its products of bytes yet.

On a GPU `stored` for every file with such matrices, if Triton computes attention: who gives a node a quantized
checkpoint expects its memory to hold no wider one. No GPU has measured these products yet.

The choice depends on the file, the CPU and the backend alone, so every start of a node gives the same tokens. We tried
a measurement at the start: it flipped between starts, because matrices that are measured in a tenth of a second lie in
the caches, where their bytes cost nothing.

A node that joins a cluster takes what the cluster's nodes take, if it can: rows that meet integer weights are rounded,
so tokens with nearly equal logits may differ between `stored` and `wide`.
"""

from __future__ import annotations

import logging
from collections.abc import Set

import torch

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import kept, open_stored
from engine.model.ops.cpu import CpuOps
from engine.model.ops.quantized import products_of_kinds
from net.compiled import NotCompiled

log = logging.getLogger("mooncake.engine")

FASTER = ("avx512_bf16", "avx512_vnni", "avx512", "avx2")
"""Levels of attention/cpu/level.py."""


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
    reason = _against(kinds, backend, dtype, cpu_level, agreed)
    if reason is None and agreed == "stored":
        log.info("--weight-dtype auto: stored, because the cluster's nodes take these weights as they are stored")
    elif reason is None:
        named = " and ".join(sorted(kinds))
        why = "Triton has products of" if backend == "triton" else "products are faster with"
        log.info("--weight-dtype auto: stored, because %s %s; wide gives %s", why, named, dtype)
    else:
        log.info("--weight-dtype auto: wide, because %s", reason)
    return "stored" if reason is None else "wide"


def _against(kinds: Set[str], backend: str, dtype: torch.dtype, cpu_level: str, agreed: str | None) -> str | None:
    """Why weights in `kinds` are widened; None if they are not."""
    if not kinds:
        return "the file has no matrices in types with kernels"
    if agreed == "wide":
        return "the cluster's nodes widen these weights"
    if backend == "triton":
        return None
    if backend != "cpu":
        return f"the attention backend is {backend}, not cpu"
    if "fp8" in kinds and dtype != torch.float32 and agreed != "stored":
        return "products of fp8 are slower for 2 to 32 rows; stored needs less memory"
    try:
        level = CpuOps(cpu_level, dtype, products_of_kinds(kinds)).level
    except NotCompiled as error:
        return str(error)
    if level in FASTER or agreed == "stored":
        return None
    return f"products of level {level} are faster in {str(dtype).removeprefix('torch.')}"

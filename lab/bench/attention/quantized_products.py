"""Kernels of products with quantized weights, compiled without a GPU: the launches for every type of weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attention.triton import aot
from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled
from engine.model.ops.triton import FP8_PRODUCTS, TritonOps
from lab.bench.attention.every_tile import meta

OUTPUTS, INPUTS = 4096, 4096
"""The o of Llama-3-8B."""

ROWS = (1, 512)
"""One of each tile of attention/triton/products/group_product.py."""

KINDS = (*BLOCKS, *SHARED)


def weight_of(kind: str, dtype: torch.dtype) -> Quantized | Scaled:
    """Without memory, for products in `dtype`."""
    if kind in BLOCKS:
        inputs, nbytes = BLOCKS[kind]
        return Quantized(kind, meta(OUTPUTS, INPUTS // inputs * nbytes, dtype=torch.uint8), dtype)
    groups = INPUTS // SHARED[kind] if SHARED[kind] else 1
    codes, scales = meta(OUTPUTS, INPUTS, dtype=torch.uint8), meta(OUTPUTS, groups, dtype=torch.float32)
    return Scaled(kind, codes, scales, dtype)


def product_launches(kind: str, rows: int, dtype: torch.dtype, capability: int) -> list[aot.Launch]:
    """All launches of a product on a GPU of `capability`."""
    run = TritonOps(fp8_rows=divmod(capability, 10) >= FP8_PRODUCTS).linear(weight_of(kind, dtype))
    return aot.record(lambda: run(meta(rows, INPUTS, dtype=dtype)))


def every_product(capability: int) -> Iterator[tuple[str, list[aot.Launch]]]:
    """(type and number of rows, launches) in bfloat16."""
    for kind in KINDS:
        for rows in ROWS:
            yield f"{kind} {rows} rows", product_launches(kind, rows, torch.bfloat16, capability)

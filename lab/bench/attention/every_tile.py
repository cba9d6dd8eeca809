"""Compiles every row of the tile table with every type of KV, without a GPU, for the GPUs of the row.

`shortfall` checks the requirements of a kernel: no register spills, shared memory within the GPU's limit, tensor cores
of the right generation, 16-byte loads, and copies in flight while the main loop computes.
tests/attention/triton/test_triton_aot.py checks kernels with more variation (heads, block sizes, windows, soft caps);
this covers all pairs of a head size and a type of KV, with the heads of Llama-3-8B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention.codes import DTYPES, SCALE_BYTES, pool_in
from attention.interface import RaggedBatch
from attention.triton import aot
from attention.triton.backend import TritonBackend
from attention.triton.tiles import HEAD_SIZES, SM80, SM86, SM90, Tile, Tiles, find_tiles

SHARED_BYTES = {80: SM80, 86: SM86, 90: SM90}
"""Compute capability -> shared memory that a program may use."""

KERNELS = {"decode_kernel": "decode", "short_kernel": "short", "prefill_kernel": "prefill", "long_kernel": "long"}
"""Kernel -> the tile of a row with which it is compiled."""

KV_TYPES = ("", *DTYPES)
"""Types of the pool; "" = the queries' type."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Further parameters that a kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


LLAMA = Variant(32, 8, 16)  # a tile of keys spans blocks
BLOCKS = Variant(32, 8, 128)  # blocks of whole tiles of keys


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quantized(*shape: int, kv_dtype: str) -> Tensor:
    """A pool of 8 blocks."""
    rows = torch.Size(shape[:-1]).numel()
    return pool_in(meta(8 * rows * (shape[-1] + SCALE_BYTES), dtype=torch.uint8), shape, kv_dtype)


def attention_launches(
    head_size: int, dtype: torch.dtype, tiles: Tiles, variant: Variant, kv_dtype: str = ""
) -> dict[str, aot.Launch]:
    """Decodes, drafts, chunks after a prefix and whole prompts, as the backend launches them; kv_dtype: one of
    KV_TYPES. Without long_kernel where the row has no tile for it, or the variant's blocks are small."""
    launches: dict[str, aot.Launch] = {}
    for q_lens, long in (([1, 1, 5, 5], None), ([1, 1, 2048, 2048], None), ([2048, 2048], tiles.long)):
        launched = backend_launches(q_lens, head_size, dtype, replace(tiles, long=long), variant, kv_dtype)
        launches |= {launch.kernel.fn.__name__: launch for launch in launched}
    return launches


def backend_launches(
    q_lens: list[int], head_size: int, dtype: torch.dtype, tiles: Tiles, variant: Variant, kv_dtype: str
) -> list[aot.Launch]:
    """One attend over contexts of 4096."""
    i32, i64 = torch.int32, torch.int64
    rows, requests = sum(q_lens), len(q_lens)
    batch = RaggedBatch(
        cu_q=meta(requests + 1, dtype=i32),
        ctx_lens=meta(requests, dtype=i32),
        block_tables=meta(requests, 256, dtype=i32),
        slot_mapping=meta(rows, dtype=i64),
        positions=meta(rows, dtype=i64),
        num_decodes=q_lens.count(1),
        block_size=variant.block_size,
        q_lens=q_lens,
        kv_lens=[4096] * requests,
    )
    q = meta(rows, variant.num_heads, head_size, dtype=dtype)
    shape = (4, 2, variant.num_kv_heads, variant.block_size, head_size)
    kv = quantized(*shape, kv_dtype=kv_dtype)[:, 1] if kv_dtype else meta(8, *shape, dtype=dtype)[:, 1]
    backend, window, soft_cap = TritonBackend(tiles=tiles), variant.window, variant.soft_cap
    sinks = meta(variant.num_heads, dtype=torch.float32) if variant.sinks else None
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    return aot.record(lambda: backend.attend(q, kv, batch, backend.plan(batch), 0.1, **options))


def shortfall(name: str, tiles: Tiles, dtype: torch.dtype, kv_dtype: str, capability: int, used: aot.Resources) -> str:
    """The requirements that the kernel `name` of KERNELS misses, compiled for these parameters; "" = none."""
    tile: Tile = getattr(tiles, KERNELS[name])
    lacking = {
        f"spills {used.spill_bytes} bytes": used.spill_bytes > 0,
        f"{used.shared_bytes} bytes of shared memory": used.shared_bytes > SHARED_BYTES[capability],
        "no 16-byte loads": used.wide_loads + used.boxes == 0,
    }
    if name == "long_kernel":
        lacking["no copies of boxes"] = used.boxes == 0
        lacking["no warp groups of its own"] = used.threads != 3 * 128
        lacking["no tensor cores"] = used.wgmma == 0
        lacking["products that wait for one another"] = used.serialized
    elif dtype.itemsize == 2:
        lacking["no tensor cores"] = used.mma + used.wgmma == 0
        if not kv_dtype:
            lacking["no copies in flight"] = tile.stages > 2 and used.in_flight == 0
            old = capability == 90 and name == "prefill_kernel" and (used.wgmma == 0 or used.mma > 0)
            lacking["tensor cores of an older generation"] = old
    return ", ".join(what for what, lacks in lacking.items() if lacks)


def every_pair(capability: int) -> Iterator[tuple[int, torch.dtype, str, Tiles]]:
    """(head size, type of queries, of KV, the table's row) for all that a GPU of `capability` runs."""
    for dtype in (torch.bfloat16, torch.float32):
        for head_size in HEAD_SIZES:
            for kv_dtype in KV_TYPES:
                tiles = find_tiles(head_size, dtype.itemsize, SHARED_BYTES[capability], quantized=bool(kv_dtype))
                yield head_size, dtype, kv_dtype, tiles

"""Timing of attention on the CPU: the cpu backend at each level of this CPU against the torch backend, in the same run.

One call is one layer's `attend`; calls walk over the layers of a page-major pool of up to 30 layers, so that no decode
finds the KV of the previous one in the cache. All levels and torch take turns, and the best of several rounds counts,
so other work on the machine disturbs all of them equally and little.

Limits, for the same number of threads:
    read   GB/s of summing as many bytes as the pool holds, in order: the limit of decode
    GEMM   GFLOP/s of a product 512 x 576 x 3072 by torch, in bfloat16 for levels that multiply it, else in float32:
           the limit of prefill if the softmax were free

On a Zen 4 (EPYC, AVX-512 with bfloat16), one thread, a short run with other work on the machine: lab/results/
2026-11-22-attention-cpu.json. Time relative to torch's: decode 0.17-0.31, prefill 0.20-0.53. Prompts of 512 tokens run
at 74-80 GFLOP/s at avx2 and avx512, while torch's product reaches 100 by its CPU time, and at 135 (71 % of the
product's) at avx512_bf16; prompts of 128 at 57-63 and 98, because many of a short prompt's keys are masked. Decode
reads 12-15 GB/s, while reading in order reaches 20 to 30, because the blocks are scattered over small pages.

On AMX (engine-cpu.md; one and two threads of a Xeon): decode 0.12-0.60 and prefill 0.39-0.52 of torch's time. Prefill
stays below half of the GEMM rate there, because a score costs an exponential in addition to two products of 64
multiply-adds, and vector arithmetic runs at half its rate next to tile instructions. Decode is bound by memory: 83 % of
the rate at which the same blocks can be read at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention.cpu.backend import CpuBackend
from attention.interface import AttentionBackend
from attention.torch_backend import TorchBackend
from lab.bench.attention.cases import LLAMA_8B, SMOLLM2, Case, batch_of
from lab.bench.common.results import Row

LAYERS = 30
POOL_BYTES = 400 << 20
"""Larger pools get fewer layers."""
SECONDS = 0.4
"""Measuring time for each number; at least one round."""
DTYPES = (torch.float32, torch.bfloat16)
MULTIPLIES_BF16 = ("amx", "avx512_bf16")
NOISE = 1.1


def cpu_cases(quick: bool) -> list[Case]:
    decodes = [(1, 1024), (8, 256)] if quick else [(1, 1024), (8, 256), (8, 1024), (32, 1024)]
    chunks = [(128, 128), (512, 512)] if quick else [(128, 128), (512, 512), (2048, 2048), (1024, 8024)]
    listed = [Case(SMOLLM2, requests, context, 1) for requests, context in decodes]
    listed += [Case(SMOLLM2, 1, context, chunk) for chunk, context in chunks]
    return listed if quick else [*listed, *(replace(listed[i], shape=LLAMA_8B) for i in (2, 6))]


def cpu_rows(block_size: int, threads: list[int], quick: bool, levels: list[str]) -> list[Row]:
    before, rows = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            gemm = {dtype: gemm_rate(dtype) for dtype in DTYPES}
            for dtype in DTYPES:
                for case in cpu_cases(quick):
                    rows += case_rows(case, block_size, count, dtype, gemm, levels)
    finally:
        torch.set_num_threads(before)
    return rows


def case_rows(
    case: Case, block_size: int, threads: int, dtype: torch.dtype, gemm: dict[torch.dtype, float], levels: list[str]
) -> list[Row]:
    """Each level's time with torch's, and its rate with the limit."""
    batch, num_blocks = batch_of(case, block_size, "cpu")
    shape = case.shape
    per_layer = num_blocks * 2 * shape.num_kv_heads * block_size * shape.head_size * dtype.itemsize
    layers = max(1, min(LAYERS, POOL_BYTES // per_layer)) if case.chunk == 1 else 2
    q = torch.randn(case.requests * case.chunk, shape.num_heads, shape.head_size).to(dtype)
    pool = torch.randn(num_blocks, 1, 2, shape.num_kv_heads, block_size, shape.head_size).to(dtype)
    pool = pool.expand(-1, layers, -1, -1, -1, -1).contiguous()

    def all_layers(backend: AttentionBackend) -> Callable[[], None]:
        plan, scale = backend.plan(batch), shape.head_size**-0.5

        def run() -> None:
            for layer in range(layers):
                backend.attend(q, pool[:, layer], batch, plan, scale)

        return run

    backends: list[AttentionBackend] = [*(CpuBackend(level) for level in levels), TorchBackend()]
    *ours, theirs = (t / layers for t in best_seconds(*(all_layers(backend) for backend in backends)))
    read = read_rate(pool) if case.chunk == 1 else 0.0
    rows = []
    for level, took in zip(levels, ours, strict=True):
        name = f"{level}, {str(dtype).removeprefix('torch.')}, {case.name}, {threads} threads"
        rows.append(Row(name, "time", "us", took * 1e6, {"torch": theirs * 1e6}))
        if case.chunk > 1:
            limit = gemm[dtype if level in MULTIPLIES_BF16 else torch.float32]
            rows.append(Row(name, "rate", "GFLOP/s", case.operations / took / 1e9, limits={"GEMM": limit}))
        else:
            moved = case.bytes_moved * dtype.itemsize / 2
            rows.append(Row(name, "rate", "GB/s", moved / took / 1e9, limits={"read": read}))
    return rows


def slower_than_torch(rows: list[Row]) -> list[str]:
    """The cases in which ours took longer, by more than the noise."""
    return [row.case for row in rows if row.ours and (row.peers.get("torch") or row.ours) * NOISE < row.ours]


def best_seconds(*calls: Callable[[], object]) -> list[float]:
    """The best seconds of each call; the calls take turns."""
    for call in calls:
        call()
    best, began = [float("inf")] * len(calls), time.perf_counter()
    while time.perf_counter() - began < SECONDS * len(calls):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def read_rate(pool: Tensor) -> float:
    """GB/s of reading the pool's bytes in order."""
    flat = pool.flatten().view(torch.float32)
    return float(flat.nbytes / best_seconds(flat.sum)[0] / 1e9)


def gemm_rate(dtype: torch.dtype) -> float:
    a, b = torch.randn(512, 576).to(dtype), torch.randn(576, 3072).to(dtype)
    return 2 * 512 * 576 * 3072 / best_seconds(lambda: a @ b)[0] / 1e9

"""Timing of attention on the CPU: the cpu backend beside the torch backend and beside limits of the same run.

One call is one layer's `attend`; calls walk over the layers of a page-major pool of 30 layers (fewer for large pools),
so that no call finds the KV of the one before in the cache. The best of some rounds counts.

Limits, for the same number of threads:
    read   GB/s of summing as many bytes as the pool holds, in order: what decode could reach
    GEMM   TFLOP/s of a bfloat16 product 2048 x 576 x 3072: what prefill could reach if the softmax were free

Floors written down before optimising (shared/reference/engine-cpu.md, SmolLM2 geometry): decode 15.8 GB/s on one
thread and 19-32 on two; prefill 1.5 TFLOP/s on one and 2.9 on two, torch's share of it 20 %. Reached: see
scripts/results/2026-11-21-attention-cpu.json (in that file another process disturbed the last row of two threads, 8B
prefill: 24 ms when undisturbed). Time beside torch's: decode 0.12-0.60, prefill 0.39-0.52. Prefill stays below half
of the GEMM rate because a score costs two products of 64 multiply-adds but also an exponential. Per 32 keys x 32
columns on one thread, all in the first-level cache: scores 70 ns, weights times V 80, maximum 16, exponentials 123;
beside each other they take about the sum, because vector arithmetic runs at half its rate while tile instructions are
under way (192 multiply-adds: 26 ns alone, 53 beside four tile loads). What is left to gain is fewer vector
instructions per score.

Decode on AMX tiles (attention/cpu/decode_amx.h) is bound by memory: on one thread from the second-level cache 31.6
GB/s, with dot products 16.4; from memory 83 % of the rate at which the same blocks can be read at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention.cpu import CpuBackend
from attention.interface import AttentionBackend
from attention.torch_backend import TorchBackend
from attention_bench.cases import LLAMA_8B, SMOLLM2, Case, batch_of
from benchlib.results import Row

LAYERS = 30
POOL_BYTES = 1 << 30
"""Larger pools get fewer layers."""
SECONDS = 0.4
"""Of measuring for each number, at least one round."""


def cpu_cases(quick: bool) -> list[Case]:
    decodes = [(1, 1024), (8, 256)] if quick else [(1, 1024), (8, 256), (8, 1024), (32, 1024)]
    chunks = [(128, 128), (512, 512)] if quick else [(128, 128), (512, 512), (2048, 2048), (1024, 8024)]
    listed = [Case(SMOLLM2, requests, context, 1) for requests, context in decodes]
    listed += [Case(SMOLLM2, 1, context, chunk) for chunk, context in chunks]
    return listed if quick else [*listed, *(replace(listed[i], shape=LLAMA_8B) for i in (2, 6))]


def cpu_rows(block_size: int, threads: list[int], quick: bool) -> list[Row]:
    before, rows = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            gemm = gemm_rate()
            for case in cpu_cases(quick):
                rows += case_rows(case, block_size, count, gemm)
    finally:
        torch.set_num_threads(before)
    return rows


def case_rows(case: Case, block_size: int, threads: int, gemm: float) -> list[Row]:
    """The case's time beside torch's, and its rate beside the limit."""
    batch, num_blocks = batch_of(case, block_size, "cpu")
    shape = case.shape
    per_layer = num_blocks * 2 * shape.num_kv_heads * block_size * shape.head_size * 2
    layers = max(1, min(LAYERS, POOL_BYTES // per_layer))
    q = torch.randn(case.requests * case.chunk, shape.num_heads, shape.head_size).bfloat16()
    pool = torch.randn(num_blocks, 1, 2, shape.num_kv_heads, block_size, shape.head_size).bfloat16()
    pool = pool.expand(-1, layers, -1, -1, -1, -1).contiguous()

    def all_layers(backend: AttentionBackend) -> Callable[[], None]:
        plan, scale = backend.plan(batch), shape.head_size**-0.5

        def run() -> None:
            for layer in range(layers):
                backend.attend(q, pool[:, layer], batch, plan, scale)

        return run

    ours = best_seconds(all_layers(CpuBackend())) / layers
    theirs = best_seconds(all_layers(TorchBackend())) / layers
    name = f"{case.name}, {threads} threads"
    if case.chunk > 1:
        rate = Row(name, "rate", "TFLOP/s", case.operations / ours / 1e12, limits={"GEMM": gemm})
    else:
        read = read_rate(pool)
        rate = Row(name, "rate", "GB/s", case.bytes_moved / ours / 1e9, limits={"read": read})
    return [Row(name, "time", "us", ours * 1e6, {"torch": theirs * 1e6}), rate]


def best_seconds(call: Callable[[], object]) -> float:
    call()
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def read_rate(pool: Tensor) -> float:
    """GB/s of reading the pool's bytes in order."""
    flat = pool.view(torch.float32).flatten()
    return flat.nbytes / best_seconds(flat.sum) / 1e9


def gemm_rate() -> float:
    a, b = torch.randn(2048, 576).bfloat16(), torch.randn(576, 3072).bfloat16()
    return 2 * 2048 * 576 * 3072 / best_seconds(lambda: a @ b) / 1e12

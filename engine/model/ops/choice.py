"""Chooses the operations of a model; on a CPU it measures which matrix products are fastest.

Candidates are torch, the kernels of this CPU's best level, and those of lower levels that compute otherwise and are
compiled already (attention/cpu/level.py). All compute, in turns, a product of one, some and many rows, with a matrix
that may fit into the last cache: it compares the arithmetic of candidates whose matrices have equally many bytes. The
best of ROUNDS counts, because other processes can only make a round longer. The product of the times decides; the first
candidate wins unless another one is faster by more than NOISE. So starts of one node seldom differ; --cpu-level with a
name and --attention-backend rule it out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.choice.quiet import undisturbed
from attention.cpu.level import lower
from engine.model.ops.cpu import ELEMENTS, CpuOps, is_compiled
from engine.model.ops.interface import Ops, TorchOps
from engine.model.ops.quantized import Products
from net.compiled import NotCompiled

log = logging.getLogger(__name__)

OUTPUTS, INPUTS = 2048, 1024
ROWS = (1, 8, 128)
ROUNDS = 5
NOISE = 1.2
"""Ratio of the products of the times for ROWS."""


def choose_ops(
    backend: str, device: str, dtype: torch.dtype, cpu_level: str = "auto", products: Products = "elements"
) -> Ops:
    """The fastest operations for a model of `dtype` on `device` with the attention backend `backend`.

    TritonOps with the backend `triton`. With `cpu`, the fastest of CpuOps and TorchOps, by a short measurement;
    `cpu_level` is a level of attention/cpu/level.py or auto. Otherwise TorchOps. The log contains the choice and the
    reason. For `products` of quantized weights, on a CPU, always CpuOps. Raises NotCompiled if the named level is not
    available on this CPU, or if there are no kernels and the weights are quantized.
    """
    if products != "elements" and device == "cpu" and backend != "triton":
        ops = CpuOps(cpu_level, dtype, products)
        log.info("matrix products with weights in %s by our kernels of level %s", products, ops.level)
        return ops
    if backend == "triton":
        from engine.model.ops.triton import TritonOps  # triton, which a node without a GPU does not load

        return TritonOps()
    if backend == "cpu" and device == "cpu" and dtype in ELEMENTS:
        try:
            return fastest_ops(candidates(cpu_level, dtype), dtype)
        except NotCompiled as reason:
            if cpu_level != "auto":
                raise
            log.warning("torch computes the matrix products, which is slower than our kernels: %s", reason)
    if products != "elements":
        raise NotCompiled(f"the attention backend is {backend}: on {device} only triton multiplies quantized weights")
    return TorchOps()


def candidates(cpu_level: str, dtype: torch.dtype) -> list[Ops]:
    """What may be fastest for matrices in `dtype`; kernels of the best level come first. Raises NotCompiled."""
    ours = [CpuOps(cpu_level, dtype)]
    if cpu_level == "auto":
        levels = lower(ours[0].level, dtype == torch.bfloat16, lambda each: is_compiled(each, dtype))
        ours += [CpuOps(level, dtype) for level in levels]
    return [*ours, TorchOps()]


def fastest_ops(among: Sequence[Ops], dtype: torch.dtype) -> Ops:
    """The one with the smallest product of times; the first one if its product is at most NOISE times that."""
    weight = torch.full((OUTPUTS, INPUTS), 0.5, dtype=dtype)
    times, threads = undisturbed(lambda check: seconds_of(among, weight, check))
    products = [math.prod(each) for each in times]
    fastest = min(range(len(among)), key=products.__getitem__)
    if products[0] <= NOISE * products[fastest]:
        fastest = 0
    log.info(
        "matrix products by %s, measured with [%d, %d] in %s, %d threads: %s",
        among[fastest].name,
        OUTPUTS,
        INPUTS,
        str(dtype).removeprefix("torch."),
        threads,
        "; ".join(f"{ops.name} {in_words(each)}" for ops, each in zip(among, times, strict=True)),
    )
    return among[fastest]


def in_words(seconds: Sequence[float]) -> str:
    """Of ROWS."""
    return ", ".join(f"{1e3 * took:.2f} ms for {m} rows" for m, took in zip(ROWS, seconds, strict=True))


def seconds_of(among: Sequence[Ops], weight: Tensor, check: Callable[[], None]) -> list[list[float]]:
    """Seconds of one product by each of `among` with a weight [out, in], for each of ROWS: the best of ROUNDS after a
    warm-up, in turns. Calls `check` after each round."""
    linears = [ops.linear(weight) for ops in among]
    best = [[math.inf] * len(ROWS) for _ in among]
    for column, rows in enumerate(ROWS):
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        for turn in range(ROUNDS + 1):
            for linear, row in zip(linears, best, strict=True):
                began = time.perf_counter()
                linear(x)
                took = time.perf_counter() - began
                row[column] = min(row[column], took) if turn else math.inf
            check()
    return best

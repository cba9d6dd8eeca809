"""Chooses the operations of a model; on a CPU it measures which matrix products are fastest.

Both candidates compute, in turns, a product larger than a core's caches: for one row, which is bound by memory, and for
many rows, which are bound by arithmetic. The best of ROUNDS counts, because other processes can only make a round
longer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch

from engine.model.ops.cpu import ELEMENTS, CpuOps
from engine.model.ops.interface import Ops, TorchOps
from engine.model.ops.quantized import Products
from net.compiled import NotCompiled

log = logging.getLogger(__name__)

OUTPUTS, INPUTS = 4096, 1024
ROWS = (1, 128)
ROUNDS = 5


def choose_ops(
    backend: str, device: str, dtype: torch.dtype, cpu_level: str = "auto", products: Products = "elements"
) -> Ops:
    """The fastest operations for a model of `dtype` on `device` with the attention backend `backend`.

    TritonOps with the backend `triton`. With `cpu`, the faster of CpuOps and TorchOps, by a short measurement;
    `cpu_level` is a level of attention/cpu/level.py or auto. Otherwise TorchOps. The log contains the choice and the
    reason. For `products` of quantized weights, on a CPU, always CpuOps. Raises NotCompiled if the named level is not
    available on this CPU, or if there are no kernels and the weights are quantized.
    """
    if products != "elements" and device == "cpu" and backend != "triton":
        return CpuOps(cpu_level, dtype, products)
    if backend == "triton":
        from engine.model.ops.triton import TritonOps  # triton, which a node without a GPU does not load

        return TritonOps()
    if backend == "cpu" and device == "cpu" and dtype in ELEMENTS:
        try:
            return faster_ops(CpuOps(cpu_level, dtype), dtype)
        except NotCompiled as reason:
            if cpu_level != "auto":
                raise
            log.warning("torch computes the matrix products, which is slower than our kernels: %s", reason)
    if products != "elements":
        raise NotCompiled(f"the attention backend is {backend}: on {device} only triton multiplies quantized weights")
    return TorchOps()


def faster_ops(ours: CpuOps, dtype: torch.dtype) -> Ops:
    """`ours`, or TorchOps if the product of its times is smaller."""
    torchs = TorchOps()
    times = seconds_of([ours, torchs], dtype)
    won = math.prod(times[0]) <= math.prod(times[1])
    log.info(
        "matrix products by %s, measured with [%d, %d] in %s, %d threads: %s",
        f"our kernels of level {ours.level}" if won else "torch",
        OUTPUTS,
        INPUTS,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        "; ".join(
            f"{name} {', '.join(f'{1e3 * t:.2f} ms for {m} rows' for m, t in zip(ROWS, each, strict=True))}"
            for name, each in zip(("ours", "torch"), times, strict=True)
        ),
    )
    return ours if won else torchs


def seconds_of(candidates: Sequence[Ops], dtype: torch.dtype) -> list[list[float]]:
    """Seconds of one product by each candidate, for each of ROWS: the best of ROUNDS after a warm-up, in turns."""
    weight = torch.full((OUTPUTS, INPUTS), 0.5, dtype=dtype)
    linears = [ops.linear(weight) for ops in candidates]
    best = [[math.inf] * len(ROWS) for _ in candidates]
    for column, rows in enumerate(ROWS):
        x = torch.ones(rows, INPUTS, dtype=dtype)
        for turn in range(ROUNDS + 1):
            for linear, row in zip(linears, best, strict=True):
                began = time.perf_counter()
                linear(x)
                took = time.perf_counter() - began
                row[column] = min(row[column], took) if turn else math.inf
    return best

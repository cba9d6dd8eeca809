"""The limits of this machine that no kernel can exceed: bytes read per second, and torch's best matrix product.

Each limit is the best of several measurements in turns, for two reasons. One product of one shape can be far below what
the machine does: torch splits some shapes badly over threads, and other work on the machine slows all rounds of some
seconds. And a limit of n threads that is below that of one thread is no limit, so one thread is measured too.

A rate above its limit means that the limit was measured wrongly (lab/bench/common/results.py marks such rows).

A level of attention/cpu/level.py below this CPU's best one stands for the CPUs that have no better one. So torch gets
the same instructions there: `environment` limits oneDNN, MKL and torch itself. They read it when a process starts, so
such limits are measured in a process of their own:

    python -m lab.bench.ops.limits 1 2      GFLOP/s of each type, for each number of threads, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cpu.level import levels_here
from engine.model.ops.huge_pages import HugePages
from lab.bench.common.timing import best_in_turns

READ_BYTES, PART_BYTES = 256 << 20, 16 << 20
"""The memory that `read_rate` reads, and the part that one call reads."""
SHAPES = ((512, 576, 3072), (2048, 576, 3072), (1024, 1024, 1024), (512, 1536, 576))
"""Rows, inputs and outputs: products of the embedded model, and a square one."""
ROUNDS = 3
SECONDS = 0.1
"""Measuring time of each product, or way to read, with each number of threads in a round."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MULTIPLIES_BF16 = ("amx", "avx512_bf16")
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
INSTRUCTIONS = {
    "avx512_bf16": ("AVX512_CORE_BF16", "AVX512", "avx512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "AVX512", "avx512"),
    "avx512": ("AVX512_CORE", "AVX512", "avx512"),
    "avx2": ("AVX2", "AVX2", "avx2"),
}
"""Level -> the most that oneDNN, MKL and torch may use."""


def environment(level: str) -> dict[str, str]:
    """Variables of a process whose torch has the instructions of `level` and no better ones. Empty for this CPU's best
    level, and for levels that torch cannot be limited to."""
    if level == levels_here()[0] or level not in INSTRUCTIONS:
        return {}
    return dict(zip(VARIABLES, INSTRUCTIONS[level], strict=True))


def multiplied(level: str, dtype: torch.dtype) -> torch.dtype:
    """The type in which a level multiplies elements of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 and level in MULTIPLIES_BF16 else torch.float32


def in_process(module: str, level: str, *arguments: str) -> str:
    """The output of `module`, run with the environment of `level`. Raises RuntimeError with its error output."""
    command, here = [sys.executable, "-m", module, *arguments], Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=here, env=os.environ | environment(level), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} at level {level} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def gemm_rates(level: str, threads: Sequence[int]) -> dict[int, dict[torch.dtype, float]]:
    """GFLOP/s for each number of threads and type of DTYPES, by a torch that has the instructions of `level`."""
    told = json.loads(in_process("lab.bench.ops.limits", level, *map(str, threads)))
    return {int(count): {DTYPES[name]: rate for name, rate in rates.items()} for count, rates in told.items()}


def read_rate(threads: int) -> float:
    """GB/s of reading READ_BYTES of huge pages in order by up to `threads` threads."""
    memory = HugePages().take(READ_BYTES // 4, dtype=torch.float32).fill_(1)
    parts, numbers = memory.split(PART_BYTES // 4), memory.view(torch.int64).split(PART_BYTES // 8)

    def rate() -> float:
        best = best_in_turns(SECONDS, [part.sum for part in parts], [part.sum for part in numbers])
        return READ_BYTES / min(map(sum, best)) / 1e9

    return best_rate(rate, threads)


def gemm_rate(dtype: torch.dtype, threads: int) -> float:
    """GFLOP/s of the fastest of torch's products of SHAPES, plain and with a weight packed by oneDNN, by up to
    `threads` threads."""
    products = [product for shape in SHAPES for product in products_of(*shape, dtype)]

    def rate() -> float:
        best = best_in_turns(SECONDS, *([call] for _, call in products))
        return max(operations / seconds / 1e9 for (operations, _), (seconds,) in zip(products, best, strict=True))

    return best_rate(rate, threads)


def best_rate(rate: Callable[[], float], threads: int) -> float:
    """The largest of ROUNDS measurements with each number of threads that counts, in turns: `threads` and one."""
    before, best = torch.get_num_threads(), 0.0
    try:
        for _ in range(ROUNDS):
            for count in sorted({1, threads}):
                torch.set_num_threads(count)
                best = max(best, rate())
    finally:
        torch.set_num_threads(before)
    return best


def products_of(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> list[tuple[int, Callable[[], Tensor]]]:
    """Pairs: operations, and the call."""
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    calls: list[Callable[[], Tensor]] = [partial(F.linear, x, weight)]
    if (packed := packed_by_onednn(weight)) is not None:
        calls.append(partial(packed, x))
    return [(2 * rows * inputs * outputs, call) for call in calls]


def packed_by_onednn(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The product with a weight [n, k] in oneDNN's own order; None if this torch has none for its type."""
    mkldnn = torch.ops.mkldnn
    try:
        ready = mkldnn._reorder_linear_weight(weight, None)
        mkldnn._linear_pointwise(weight[:1], ready, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda x: mkldnn._linear_pointwise(x, ready, None, "none", [], "")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    print(
        json.dumps(
            {count: {name: gemm_rate(dtype, int(count)) for name, dtype in DTYPES.items()} for count in sys.argv[1:]}
        )
    )

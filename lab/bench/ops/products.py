"""Each product of the embedded model's layer: ours, F.linear, oneDNN with packed weights, and the machine's limits.
The time to pack weights does not count."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cpu import build as cpu_build
from attention.cpu.level import LEVELS
from engine.model.ops.cpu import CpuOps
from engine.model.ops.huge_pages import HugePages
from engine.model.ops.interface import Linear
from lab.bench.common.results import Row
from lab.bench.common.timing import timed
from lab.bench.ops.limits import gemm_rate, packed_by_onednn, read_rate

HIDDEN, INNER, QKV, VOCAB = 576, 1536, 960, 49152
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
ROTATE_BYTES = 256 << 20
"""Weights of one shape rotate over this many bytes, like the weights of a model in a step, so few of them are
cached."""

SECONDS = 0.15  # time of repetitions per figure; the shortest counts


def limits(threads: int, level: str, dtype: torch.dtype) -> dict[str, float]:
    """read: GB/s from huge pages. With AMX tiles: TFLOP/s of tiles that stay in registers; else GEMM: of torch's
    fastest product."""
    if (level, dtype) != ("amx", torch.bfloat16):
        return {"read": read_rate(threads), "GEMM": gemm_rate(dtype, threads) / 1e3}
    library = cpu_build.load("limits", [Path(__file__).with_name("limits.cpp")], LEVELS["amx"], ("-Wno-uninitialized",))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    library.multiply_tiles.argtypes = [ctypes.c_int64, ctypes.c_int32]
    memory = HugePages().take(ROTATE_BYTES // 2).fill_(1)
    rounds = 200_000
    return {
        "read": ROTATE_BYTES / shortest(lambda: library.read_memory(memory.data_ptr(), ROTATE_BYTES, threads)) / 1e9,
        "tiles": rounds * 4 * 16384 * threads / shortest(lambda: library.multiply_tiles(rounds, threads)) / 1e12,
    }


def product_rows(rows: Sequence[int], threads: int, level: str, dtype: torch.dtype) -> list[Row]:
    """GB/s of weights up to 32 rows of x, TFLOP/s beyond. Kernels of one level."""
    torch.set_num_threads(threads)
    ceiling = limits(threads, level, dtype)
    where = f"{level}, {str(dtype).removeprefix('torch.')}, {threads} threads"
    found = [
        Row(f"limit, {where}", name, "GB/s" if name == "read" else "TFLOP/s", limit) for name, limit in ceiling.items()
    ]
    for name, shape in (SHAPES | {"head": (VOCAB, HIDDEN)}).items():
        makers = contenders(name, CpuOps(level, dtype))
        count = max(1, ROTATE_BYTES // (dtype.itemsize * shape[0] * shape[1]))
        weights = [torch.randn(shape).to(dtype) for _ in range(count)]
        seconds: dict[str, dict[int, float]] = {}
        for contender, make in makers.items():
            made = [make(weight) for weight in weights]
            seconds[contender] = {
                m: per_call(made if m <= 32 else made[:4], torch.randn(m, shape[1]).to(dtype)) for m in rows
            }
        for m in rows:
            if name != "head" or m <= 32:
                by = {who: times[m] for who, times in seconds.items()}
                found.append(_row(f"{name}, {m} rows, {where}", shape, m, dtype, by, ceiling))
    return found


def contenders(name: str, ops: CpuOps) -> dict[str, Callable[[Tensor], Linear]]:
    """The competing products, ours first. gate_up ends gated and head in float32, as the model needs them."""
    gate = (lambda y: F.silu(y[:, :INNER]) * y[:, INNER:]) if name == "gate_up" else None
    finish: Callable[[Tensor], Tensor] = gate or (Tensor.float if name == "head" else lambda y: y)
    ours: Callable[[Tensor], Linear] = ops.linear
    if name == "gate_up":
        ours = ops.gated_linear
    if name == "head":
        ours = lambda weight: ops.vocabulary(weight).logits  # noqa: E731
    found: dict[str, Callable[[Tensor], Linear]] = {
        "ours": ours,
        "F.linear": lambda weight: lambda x: finish(F.linear(x, weight)),
    }
    if ops.dtype == torch.bfloat16 and packed_by_onednn(torch.zeros(16, 32, dtype=ops.dtype)) is not None:

        def packed(weight: Tensor) -> Linear:
            product = packed_by_onednn(weight)
            assert product is not None  # it had one for this type
            return lambda x: finish(product(x))

        found["oneDNN packed"] = packed
    return found


def _row(
    case: str,
    shape: tuple[int, int],
    m: int,
    dtype: torch.dtype,
    seconds: dict[str, float],
    ceiling: dict[str, float],
) -> Row:
    work, limit, unit = dtype.itemsize * shape[0] * shape[1] / 1e9, "read", "GB/s"
    if m > 32:
        (limit,) = ceiling.keys() - {"read"}
        work, unit = 2 * m * shape[0] * shape[1] / 1e12, "TFLOP/s"
    rates: dict[str, float | None] = {who: work / each for who, each in seconds.items()}
    ours = rates.pop("ours")
    return Row(case, "rate", unit, ours, rates, {limit: ceiling[limit]})


def per_call(linears: Sequence[Linear], x: Tensor) -> float:
    def all_of_them() -> None:
        for linear in linears:
            linear(x)

    return shortest(all_of_them) / len(linears)


def shortest(run: Callable[[], object]) -> float:
    """Seconds of the shortest run in SECONDS; three runs at least."""
    return min(timed(run, 3, SECONDS))

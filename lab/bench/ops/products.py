"""Each product of the embedded model's layer: ours, F.linear, oneDNN with packed weights, and the machine's limits.
The time to pack weights does not count."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
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
from lab.bench.common.timing import best_in_turns, timed
from lab.bench.ops.limits import gemm_rate, multiplied, packed_by_onednn, read_rate

HIDDEN, INNER, QKV, VOCAB = 576, 1536, 960, 49152
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
ROTATE_BYTES = 256 << 20
"""Weights of one shape rotate over this many bytes, like the weights of a model in a step, so few of them are
cached."""

SECONDS = 0.15  # time of repetitions per figure; the shortest counts
LARGEST_HEAD = 32
"""Maximum rows of a product with the vocabulary: a step needs the logits of few tokens."""
TORCH = "F.linear"
GOAL_METRIC = "time / F.linear's"
NOISE = 1.1


def limits(threads: int, level: str, dtype: torch.dtype) -> dict[str, float]:
    """read: GB/s from huge pages. With AMX tiles: TFLOP/s of tiles that stay in registers; else GEMM: of torch's
    fastest product, in float32 where the level widens the elements."""
    if (level, dtype) != ("amx", torch.bfloat16):
        return {"read": read_rate(threads), "GEMM": gemm_rate(multiplied(level, dtype), threads) / 1e3}
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
    """GB/s of weights up to 32 rows of x, TFLOP/s beyond. The contenders take turns, so other work on the machine
    disturbs all of them equally. Limits are the better ones of before and after."""
    torch.set_num_threads(threads)
    before = limits(threads, level, dtype)
    where = f"{level}, {str(dtype).removeprefix('torch.')}, {threads} threads"
    measured = []
    for name, shape in (SHAPES | {"head": (VOCAB, HIDDEN)}).items():
        count = max(1, ROTATE_BYTES // (dtype.itemsize * shape[0] * shape[1]))
        weights = [torch.randn(shape).to(dtype) for _ in range(count)]
        made = {
            who: [make(weight) for weight in weights] for who, make in contenders(name, CpuOps(level, dtype)).items()
        }
        for m in rows:
            if name != "head" or m <= LARGEST_HEAD:
                by = seconds_of(made, torch.randn(m, shape[1]).to(dtype))
                measured.append((f"{name}, {m} rows, {where}", shape, m, by))
    after = limits(threads, level, dtype)
    ceiling = {name: max(limit, after[name]) for name, limit in before.items()}
    return [
        *(Row(f"limit, {where}", name, "GB/s" if name == "read" else "TFLOP/s", ceiling[name]) for name in ceiling),
        *(_row(case, shape, m, dtype, by, ceiling) for case, shape, m, by in measured),
    ]


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
        TORCH: lambda weight: lambda x: finish(F.linear(x, weight)),
    }
    if packed_by_onednn(torch.zeros(16, 32, dtype=ops.dtype)) is not None:

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


def goal_rows(rows: Sequence[Row]) -> list[Row]:
    """For each number of rows of x, level, type and number of threads: the largest time of a product in times of
    torch's, and the goal."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.metric == "rate" and row.ours and (torchs := row.peers.get(TORCH)):
            ratios.setdefault(row.case.partition(", ")[2], []).append(torchs / row.ours)
    return [
        Row(f"slowest product, {where}", GOAL_METRIC, "", max(each), limits={"goal": 1.0})
        for where, each in ratios.items()
    ]


def slower_than_torch(rows: Sequence[Row]) -> list[str]:
    """The cases of goal rows that miss the goal by more than the noise."""
    return [row.case for row in rows if row.metric == GOAL_METRIC and (row.ours or 0.0) > NOISE]


def seconds_of(made: dict[str, list[Linear]], x: Tensor) -> dict[str, float]:
    """Of one product, for each contender."""
    linears = [each if len(x) <= 32 else each[:4] for each in made.values()]
    best = best_in_turns(SECONDS, *([partial(_all, each, x)] for each in linears))
    return {who: took / len(each) for who, each, (took,) in zip(made, linears, best, strict=True)}


def _all(linears: Sequence[Linear], x: Tensor) -> None:
    for linear in linears:
        linear(x)


def per_call(linears: Sequence[Linear], x: Tensor) -> float:
    return shortest(partial(_all, linears, x)) / len(linears)


def shortest(run: Callable[[], object]) -> float:
    """Seconds of the shortest run in SECONDS; three runs at least."""
    return min(timed(run, 3, SECONDS))

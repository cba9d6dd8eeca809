"""Products of quantized weights: those of one layer of the embedded model, and the same products of widened weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import Linear
from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled
from lab.bench.common.results import Row
from lab.bench.ops.limits import read_rate
from lab.bench.ops.products import HIDDEN, LARGEST_HEAD, ROTATE_BYTES, SHAPES, VOCAB, per_call

ITEM_BYTES = {kind: nbytes / inputs for kind, (inputs, nbytes) in BLOCKS.items()} | dict.fromkeys(SHARED, 1.0)
"""Kind of weights -> bytes of an element; without the float32 scales of int8 and fp8."""


def quantized_rows(rows: Sequence[int], threads: int, level: str, dtype: torch.dtype) -> list[Row]:
    """Microseconds of a product; the limit is its bytes of weights at the rate at which this machine reads."""
    torch.set_num_threads(threads)
    read = read_rate(threads)
    where = f"{level}, {str(dtype).removeprefix('torch.')}, {threads} threads"
    found = []
    for name, shape in (SHAPES | {"head": (VOCAB, HIDDEN)}).items():
        counts = [m for m in rows if name != "head" or m <= LARGEST_HEAD]
        wide = _made(CpuOps(level, dtype), name, shape, dtype.itemsize, None, dtype)
        times = {m: _time(wide, m, shape, dtype) for m in counts}
        for kind, item in ITEM_BYTES.items():
            if kind in BLOCKS and shape[1] % BLOCKS[kind][0]:
                continue
            ops = CpuOps(level, dtype, "groups" if kind in BLOCKS else "bytes")
            linears = _made(ops, name, shape, item, kind, dtype)
            floor = shape[0] * shape[1] * item / read / 1e3
            for m in counts:
                ours = _time(linears, m, shape, dtype)
                case = f"{name} {kind}, {m} rows, {where}"
                found.append(Row(case, "time", "us", ours, {"widened": times[m]}, {"read": floor}))
    return found


def random_weight(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Quantized | Scaled:
    if kind == "fp8":
        return Scaled.fp8(torch.randn(shape), dtype)
    if kind == "int8":
        return Scaled(kind, torch.randint(0, 256, shape, dtype=torch.uint8), torch.full((shape[0], 1), 0.01), dtype)
    inputs, nbytes = BLOCKS[kind]
    blocks = torch.randint(0, 256, (shape[0], shape[1] // inputs, nbytes), dtype=torch.uint8)
    scale = slice(nbytes - 2, nbytes) if kind == "q6_k" else slice(2)
    blocks[..., scale] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    blocks[..., 2:4] &= 0x3F  # the minimum, of kinds that have one: below 2
    if kind == "mxfp4":
        blocks[..., 0] = 120
    return Quantized(kind, blocks.view(shape[0], -1), dtype)


def _made(
    ops: CpuOps, name: str, shape: tuple[int, int], item: float, kind: str | None, dtype: torch.dtype
) -> list[Linear]:
    """Copies of one weight, enough of them to exceed the caches; `item`: bytes of an element."""
    count = max(1, int(ROTATE_BYTES / (item * shape[0] * shape[1])))
    weight = torch.randn(shape).to(dtype) if kind is None else random_weight(kind, shape, dtype)
    if name == "head":
        return [ops.vocabulary(weight).logits for _ in range(count)]
    make = ops.gated_linear if name == "gate_up" else ops.linear
    return [make(weight) for _ in range(count)]


def _time(linears: Sequence[Linear], rows: int, shape: tuple[int, int], dtype: torch.dtype) -> float:
    return 1e6 * per_call(linears if rows <= 32 else linears[:4], torch.randn(rows, shape[1]).to(dtype))

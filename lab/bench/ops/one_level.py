"""Rows of one level, in a process whose torch has the instructions of that level (lab/bench/ops/limits.py).

python -m lab.bench.ops.one_level '{"part": "products", "level": "avx2", "counts": [1], "threads": 1, "dtype":
    "float32"}'      the rows as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from lab.bench.common.results import Row
from lab.bench.ops.limits import in_process
from lab.bench.ops.products import product_rows
from lab.bench.ops.quantized import quantized_rows

PARTS = {"products": product_rows, "quantized": quantized_rows}


def rows_at(level: str, part: str, counts: Sequence[int], threads: int, dtype: str) -> list[Row]:
    """`part`: a key of PARTS; `counts`: rows of x. Raises RuntimeError with the process's error output."""
    told = {"part": part, "level": level, "counts": list(counts), "threads": threads, "dtype": dtype}
    return [Row(**row) for row in json.loads(in_process("lab.bench.ops.one_level", level, json.dumps(told)))]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    asked = json.loads(sys.argv[1])
    rows = PARTS[asked["part"]](asked["counts"], asked["threads"], asked["level"], getattr(torch, asked["dtype"]))
    print(json.dumps([asdict(row) for row in rows]))

"""The products of a step at each level of this CPU, against F.linear, oneDNN's packed weights and the machine's limits.

  scripts/bench.py ops                    # products, then whole steps; about two minutes
  scripts/bench.py ops --only steps --threads 2 --json steps.json

A rate is GB/s of weights up to 32 rows of x, where memory is the limit, and TFLOP/s beyond. Limits are measured in the
same run: reading from huge pages, and AMX tile products that stay in registers or torch's product. Rows of quantized
weights are times: of the product, of that with the widened weight, and of reading the bytes of the weight. The results
are invalid if other processes use the cores. Exit code 1: one of ours is slower than F.linear.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import product

import torch

from attention.cpu.level import levels_here
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.ops.products import product_rows
from lab.bench.ops.quantized import quantized_rows
from lab.bench.ops.steps import step_rows
from lab.flag_types import positive

NOISE = 0.9
PRODUCTS = {"products": product_rows, "quantized": quantized_rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="CPU threads to measure with")
    parser.add_argument("--only", choices=("products", "quantized", "steps"), help="run only this part")
    parser.add_argument(
        "--cpu-level", nargs="+", default=levels_here(), help="levels to measure; default: all of this CPU"
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="types of the products")
    args = parser.parse_args(arguments)
    if not levels_here() or set(args.cpu_level) - set(levels_here()):
        parser.error(f"--cpu-level: this CPU has {', '.join(levels_here()) or 'none'}")
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    counts = [1, 32] if args.quick else [1, 8, 32, 128, 512, 2048]
    parts = [part for name, part in PRODUCTS.items() if args.only in (None, name)]
    for threads, part in product(args.threads, parts):
        for level, dtype in product(args.cpu_level, args.dtype):
            rows += part(counts, threads, level, getattr(torch, dtype))
    if args.only in (None, "steps"):
        prompts = [128] if args.quick else [128, 512, 2048]
        rows += step_rows([1, 8] if args.quick else [1, 8, 32], [256, 1024], prompts, args.threads)
    config = {name: value for name, value in vars(args).items() if name != "json"}
    report(config, rows, args.json)
    slower = [
        row.case for row in rows if row.metric == "rate" and (row.ours or 0) < NOISE * (row.peers.get("F.linear") or 0)
    ]
    for case in slower:
        print(f"slower than torch: {case}")
    return 1 if slower else 0

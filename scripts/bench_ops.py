#!/usr/bin/env python
"""The products of a step on a CPU with AMX, beside F.linear, oneDNN's packed weights, and what the machine can do.

  scripts/bench_ops.py                    # products, then whole steps; about two minutes
  scripts/bench_ops.py --only steps --threads 2 --json steps.json

A rate is GB/s of weights up to 32 rows of x, where memory is the limit, and TFLOP/s beyond. Limits are taken in the
same run: reading from huge pages, and tile products that stay in registers. Void if anything else uses the cores.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchlib.results import Row, add_result_flags, report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout's engine/, installed or not

from attention.cpu_build import Unavailable, require
from engine.model.ops_cpu import FEATURES
from ops_bench.products import product_rows
from ops_bench.steps import step_rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads to measure with")
    parser.add_argument("--only", choices=("products", "steps"), help="leave the other part out")
    args = parser.parse_args(arguments)
    try:
        require(FEATURES)
    except Unavailable as reason:
        parser.error(f"nothing to measure: {reason}")
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    if args.only != "steps":
        for threads in args.threads:
            rows += product_rows([1, 32] if args.quick else [1, 8, 32, 128, 512, 2048], threads)
    if args.only != "products":
        prompts = [128] if args.quick else [128, 512, 2048]
        rows += step_rows([1, 8] if args.quick else [1, 8, 32], [256, 1024], prompts, args.threads)
    config = {name: value for name, value in vars(args).items() if name != "json"}
    report(config, rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

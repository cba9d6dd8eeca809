"""The products of a step at each level of this CPU, against F.linear, oneDNN's packed weights and the machine's limits.

  scripts/bench.py ops                    # products, then whole steps; some minutes
  scripts/bench.py ops --only products --cpu-level all --dtype float32 bfloat16 float16
  scripts/bench.py ops --only steps --threads 2 --json steps.json

A rate is GB/s of weights up to 32 rows of x, where memory is the limit, and TFLOP/s beyond. Limits are measured in the
same run: reading from huge pages, and AMX tile products that stay in registers or torch's best product. Rows of
quantized weights are times: of the product, of that with the widened weight, and of reading the bytes of the weight.
The results are invalid if other processes use the cores.

Each level is measured in a process whose torch has the instructions of that level and no better ones: the level is for
CPUs without them. On this CPU `auto` measures itself against a torch that has all of them. Rows "slowest product" have
the goal: no product of a level, type and number of rows takes longer than F.linear. Exit code 1: one misses it by more
than the noise.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import product

import torch

from attention.cpu.level import levels_here
from engine.model.ops.cpu import ELEMENTS
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.ops.one_level import PARTS, rows_at
from lab.bench.ops.products import goal_rows, slower_than_torch
from lab.bench.ops.steps import step_rows
from lab.flag_types import positive

TYPES = [str(dtype).removeprefix("torch.") for dtype in ELEMENTS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="CPU threads to measure with")
    parser.add_argument("--only", choices=(*PARTS, "steps"), help="run only this part")
    parser.add_argument(
        "--cpu-level", nargs="+", default=["all"], help="levels to measure; default: all, which this CPU has"
    )
    parser.add_argument("--dtype", nargs="+", default=TYPES[:2], choices=TYPES, help="types of the products")
    args = parser.parse_args(arguments)
    if args.cpu_level == ["all"]:
        args.cpu_level = levels_here()
    if not args.cpu_level or set(args.cpu_level) - set(levels_here()):
        parser.error(f"--cpu-level: this CPU has {', '.join(levels_here()) or 'none'}")
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    counts = [1, 32] if args.quick else [1, 8, 32, 128, 512, 2048]
    parts = [part for part in PARTS if args.only in (None, part)]
    for threads, part, level, dtype in product(args.threads, parts, args.cpu_level, args.dtype):
        rows += rows_at(level, part, counts, threads, dtype)
    if args.only in (None, "steps"):
        prompts = [128] if args.quick else [128, 512, 2048]
        rows += step_rows([1, 8] if args.quick else [1, 8, 32], [256, 1024], prompts, args.threads)
    rows += goal_rows(rows)
    config = {name: value for name, value in vars(args).items() if name != "json"}
    report(config, rows, args.json)
    slower = slower_than_torch(rows)
    for case in slower:
        print(f"slower than torch: {case}")
    return 1 if slower else 0

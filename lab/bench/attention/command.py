"""Measures attention kernels: GB/s of decode and TFLOP/s of chunked prefill, compared with limits and peers. The
limits are ceilings of the same run.

  scripts/bench.py attention                  # on a GPU: measure
  scripts/bench.py attention --aot            # without one: compile for --capability, report registers and memory
  scripts/bench.py attention --aot --every-tile   # every tile with every type of KV; exit code 1: one lacks something
  scripts/bench.py attention --device cpu     # the C++ kernels, every level of this CPU, and the torch backend, for
                                              # each of --threads; exit code 1: one is slower than torch
  scripts/bench.py attention --quick --json attention.json

Geometries are Llama-3-8B's (32 query heads, 8 KV heads of 128) and SmolLM2-135M's (9, 3 of 64), bfloat16. Times are
medians of CUDA-graph replays over rotating inputs that together exceed the L2 cache. Bytes and operations are counted,
not profiled: decode moves K, V, q and out once; prefill needs 4 heads head_size multiply-adds per visible (row, key).

Peers are torch's SDPA (flash and cuDNN), FlexAttention and, where it is installed, FlashInfer. SDPA and FlexAttention
get K and V as dense tensors, so they save the block table, which ours pays for. A peer that refuses a shape is missing.

No figure has been measured on a GPU yet. lab/bench/attention/on_cpu.py describes the measurement on the CPU.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from lab.bench.common.results import Row, add_result_flags, report
from lab.flag_types import positive


def parse(arguments: Sequence[str] | None) -> Namespace:
    """The command line. Exits with a remedy if there is no device to measure on."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--aot", action="store_true", help="compile only; needs no GPU")
    parser.add_argument(
        "--capability", type=int, choices=(80, 86, 90), help="target of --aot; default 90, with --every-tile: each"
    )
    parser.add_argument(
        "--every-tile", action="store_true", help="with --aot: every head size and type of queries and KV (minutes)"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where to measure")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="torch threads, with --device cpu")
    parser.add_argument("--cpu-level", nargs="+", help="levels to measure, with --device cpu; default: all of this CPU")
    parser.add_argument("--block-size", type=positive, default=16, help="tokens per KV block")
    args = parser.parse_args(arguments)
    if args.every_tile and not args.aot:
        parser.error("--every-tile needs --aot")
    if args.capability is None and not args.every_tile:
        args.capability = 90
    if args.device == "cpu" and not args.aot:
        from attention.cpu.level import levels_here

        args.cpu_level = args.cpu_level or levels_here()
        if missing := set(args.cpu_level) - set(levels_here()):
            parser.error(f"--cpu-level {', '.join(missing)}: this CPU has {', '.join(levels_here()) or 'none'}")
        return args
    if find_spec("triton") is None:
        parser.error("triton is not installed: pip install -e .[triton]")
    if not args.aot and not torch.cuda.is_available():
        parser.error("no GPU is visible: use --aot to compile without one, or --device cpu")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    rows: list[Row] = []
    lacking: list[str] = []
    summary: list[str] = []
    if args.every_tile:
        from lab.bench.attention.compiled import tile_rows

        for capability in (80, 86, 90) if args.capability is None else (args.capability,):
            more, short = tile_rows(capability)
            rows, lacking = rows + more, [*lacking, *(f"lacking: {line}" for line in short)]
    elif args.aot:
        from lab.bench.attention.compiled import compiled_rows

        rows = compiled_rows(args.capability, args.block_size, args.quick)
    elif args.device == "cpu":
        from lab.bench.attention.on_cpu import cpu_rows, share_rows, shares, slower_than_torch

        rows = cpu_rows(args.block_size, args.threads, args.quick, args.cpu_level)
        lacking = [f"slower than torch: {case}" for case in slower_than_torch(rows)]
        summary = shares(rows)
        rows += share_rows(rows)
    else:
        from lab.bench.attention.measured import measured_rows

        rows = measured_rows(args.block_size, args.quick)
    config = {name: value for name, value in vars(args).items() if name != "json"}
    config |= {"torch": torch.__version__, "device": device_name(args)}
    print(config["device"])
    report(config, rows, args.json)
    for line in [*summary, *lacking]:
        print(line)
    return 1 if lacking else 0


def device_name(args: Namespace) -> str:
    """The device on which the numbers were measured."""
    if args.aot:
        return "none"
    if args.device == "cuda":
        return torch.cuda.get_device_name()
    from attention.cpu.build import cpu_features
    from attention.cpu.level import LEVELS

    wanted = {feature for features in LEVELS.values() for feature in features}
    return f"cpu with {', '.join(sorted(wanted & cpu_features()))}"

"""Finds the tiles of one row of attention/triton/tiles.py: compiles every candidate, and times on a GPU those that fit.

  scripts/bench.py tune-attention --head-size 128                         # on a GPU: the row for it, printed to paste
  scripts/bench.py tune-attention --head-size 128 --write                 # the same, and write it to the table
  scripts/bench.py tune-attention --head-size 128 --dry-run               # without a GPU: the compiler's reports

A candidate is rejected if it spills registers, needs more shared memory than the GPU has, or does not compile. Times
are geometric means over a few decodes, or prefill chunks, of 32 query heads and 8 KV heads; a new one must win by
--margin. --quick tries the first candidates only. --json has a row for each candidate: its time, or, with --dry-run,
its registers.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lab.bench.common.results import Row, add_result_flags, quicken, write_result
from lab.flag_types import positive, share

ROOT = Path(__file__).resolve().parents[3]

TABLE = ROOT / "attention" / "triton" / "tiles.py"
QUICK_LIMIT = 4
MEASURED = {True: ("registers", "per thread"), False: ("time", "us")}
"""--dry-run given -> metric and unit of a candidate's row."""


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head-size", type=int, required=True, choices=(64, 128, 256), help="largest head size of the row"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="element type")
    parser.add_argument(
        "--kind", choices=("decode", "prefill", "long"), help="only this kernel's tile; default: all of the row"
    )
    parser.add_argument("--capability", type=int, choices=(80, 86, 90), help="with --dry-run; default: 90")
    parser.add_argument("--dry-run", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--write", action="store_true", help="replace the row in attention/triton/tiles.py")
    parser.add_argument("--margin", type=share, default=0.02, help="share of time a new tile must save (default 0.02)")
    parser.add_argument("--limit", type=positive, default=1000, help="candidates per kernel at most")
    add_result_flags(parser)
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="compiling processes")
    args = quicken(parser.parse_args(arguments), limit=QUICK_LIMIT)
    if find_spec("triton") is None:
        parser.error("triton is not installed: pip install -e .[triton]")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no GPU is visible: use --dry-run to compile without one")
    if args.dry_run and args.write:
        parser.error("--dry-run has no times to write: omit --write")
    if args.capability and not args.dry_run:
        parser.error("--capability needs --dry-run; a GPU's own capability is used")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    from lab.bench.attention.tuning import DTYPES, Target, row_of, with_row

    target = Target(args.head_size, DTYPES[args.dtype], args.capability if args.dry_run else own_capability())
    if args.dry_run and args.capability is None:
        target = replace(target, capability=90)
    tiles = target.current
    found: list[Row] = []
    if args.kind and args.kind not in target.kinds:
        raise SystemExit(f"--kind {args.kind}: the row {target.key} has no such tile")
    for kind in [args.kind] if args.kind else target.kinds:
        tiles = replace(tiles, **{kind: best_tile(kind, target, args, found)})
    row = row_of(target, tiles)
    print(row)
    if args.json is not None:
        config = {name: value for name, value in vars(args).items() if name != "json"}
        write_result(config | {"capability": target.capability, "row": row.strip()}, found, args.json)
    if args.write:
        TABLE.write_text(with_row(TABLE.read_text(), target, row))
        print(f"written: {TABLE}; now run scripts/test tests/attention")
    return 0


def own_capability() -> int:
    """The capability of this GPU's row in the table."""
    major, minor = torch.cuda.get_device_capability()
    return 90 if major >= 9 else 86 if minor >= 6 else 80


def best_tile(kind: str, target: Any, args: Namespace, rows: list[Row]) -> Any:
    """The fastest candidate that fits; with --dry-run the shipped one, if it fits. Adds a row for each candidate.
    Raises SystemExit if none fits."""
    from lab.bench.attention.tuning import candidates, compile_all, seconds_of

    shipped, fitting = None, 0
    best, best_seconds = None, 0.0
    for compiled in compile_all(kind, target, candidates(kind, target)[: args.limit], args.jobs):
        tile, verdict = compiled.tile, compiled.problem
        case = f"{kind}, rows {tile.rows}, keys {tile.keys}, warps {tile.warps}, stages {tile.stages}"
        if verdict:
            rows.append(Row(case, *MEASURED[args.dry_run], None, note=f"{case}: {verdict}"))
        else:
            fitting += 1
            verdict = f"{compiled.registers} registers, {compiled.shared_bytes // 1024} KiB"
            shipped = shipped or tile
            if args.dry_run:
                rows.append(Row(case, *MEASURED[True], float(compiled.registers)))
            else:
                seconds = seconds_of(kind, target, tile)
                rows.append(Row(case, *MEASURED[False], seconds * 1e6))
                verdict += f", {seconds * 1e6:.1f} us"
                if best is None or seconds < best_seconds * (1 - args.margin):
                    best, best_seconds = tile, seconds
        print(
            f"{kind:8} rows {tile.rows:3} keys {tile.keys:3} warps {tile.warps} stages {tile.stages}: {verdict}",
            flush=True,
        )
    if not fitting:
        raise SystemExit(f"no candidate for {kind} fits; the shipped tile stays")
    return best or shipped

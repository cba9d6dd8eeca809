"""All measurements that need a GPU, in one command on one GPU, in under ten minutes: measured, limit, share, goal.

  scripts/tools.py gpu-check                              # all sections
  scripts/tools.py gpu-check --only attention,engine      # some of them
  scripts/tools.py gpu-check --json gpu.json              # also written after every section
  scripts/tools.py gpu-check --write-tiles                # the fastest tiles go into attention/triton/tiles.py

  kernels     the grid of tests/attention/interpreted on the GPU, compared with float64
  sanitizer   a part of it under compute-sanitizer's memcheck, if that is installed
  attention   decode and short queries relative to the measured copy bandwidth, prefill to the measured GEMM rate, and
              peers: torch's attention and, where it is installed, FlashInfer
  tiles       the shipped tiles of heads of 128 against the most promising others
  engine      Llama-3-8B's geometry with random weights: decode steps against their floor in bytes, prefill against GEMM
  serving     nodes with --device cuda give a CPU node's tokens, with and without CUDA graphs, and as prefill + decode
  staging     KV layers between GPU and page-locked host memory, compared with one plain copy
  ranks       the same for an arena on two GPUs; nodes with --tensor-parallel-size 2 give the tokens of a CPU node

Each section runs in a separate process with a time limit; a section that fails keeps its lines so far and adds a line
with the reason. Exit code 0: all goals were reached; 1: a line failed or is short; 2: there is no GPU here.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from lab.flag_types import file_to_write
from lab.gpu.checks import Check, exit_code, table
from lab.gpu.sections import BUDGET_S, run_sections, serve_section


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BUDGET_S), help="sections, joined by commas; default: all")
    parser.add_argument(
        "--json", type=file_to_write, metavar="PATH", help="write the lines as JSON, after every section"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the sections' output here; default: a new folder"
    )
    parser.add_argument(
        "--write-tiles",
        action="store_true",
        help="replace the row of heads of 128 if the section tiles finds a faster one",
    )
    parser.add_argument("--section", choices=tuple(BUDGET_S), help="measure one section in this process")
    parser.add_argument("--lines", type=Path, metavar="PATH", help="with --section: file for its lines")
    args = parser.parse_args(arguments)
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in BUDGET_S]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; --only takes {', '.join(BUDGET_S)}")
    if args.section and args.lines is None:
        parser.error("--section needs --lines")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU is visible to torch; kernels are checked without one by scripts/test tests/attention")
        return 2
    if args.section:
        serve_section(args.section, args.lines)
        if args.section == "tiles" and args.write_tiles:
            from lab.gpu.tiles import write

            write()
        return 0
    folder = args.logs or Path(tempfile.mkdtemp(prefix="gpu_check_"))
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}

    def save(checks: Sequence[Check]) -> None:
        if args.json is not None:
            lines = [asdict(check) | {"share": check.share, "verdict": check.verdict} for check in checks]
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"config": about, "checks": lines}, indent=2) + "\n")

    checks = run_sections(args.only, folder, save, ["--write-tiles"] if args.write_tiles else [])
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(table(checks))
    code: int = exit_code(checks)
    return code

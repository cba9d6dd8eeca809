"""Swaps a kernel by file: checks it against the reference grid, times it against the built-in ones, and serves with it.

  scripts/playground.py attention --backend lab/playground/naive_attention.py
  scripts/playground.py attention --backend mine.py:Mine --quick
  scripts/playground.py attention --backend mine.py:Mine --serve --port 8000        more flags go to mooncake.py

Your file defines a class with the methods of attention/interface.py, or a function that returns such an object; the
example above has thirty lines. Give its name after a colon if the file has several.

check    every step of lab/bench/attention/grid.py: ragged mixes, head sizes, block sizes, three types, windows and
         soft caps, NaN in memory that must not be read; |yours - float64| <= 2 |plain torch - float64| + 1e-6. A kernel
         may refuse a window or a soft cap with NotImplementedError; any other exception is a fault. With reads_codes =
         True it also checks some steps over int8 and fp8 pools (lab/bench/attention/quantized.py). The command names
         the first wrong step and ends with exit code 1.
bench    write_kv + attend, bfloat16, at the geometries of SmolLM2-135M and Llama-3-8B, compared with every built-in
         backend that runs here.
serve    a node with --attention-backend FILE.py:NAME. Your file runs with your rights: serve only what you wrote.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from attention import backends
from attention.choice.choose import choose
from attention.codes import DTYPES
from attention.declared import reads_codes
from attention.interface import AttentionBackend
from lab.bench.attention.grid import find_fault, points
from lab.bench.attention.quantized import find_quantized_fault
from lab.bench.attention.side_by_side import compare
from lab.bench.common.results import add_result_flags, report
from net.user_file import is_file

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Verdict:
    """The grid's verdict on a backend."""

    right: int = 0
    refused: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)  # (step, fault)

    @property
    def steps(self) -> int:
        return self.right + self.refused + len(self.faults)


def parse(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """(our flags, the node's flags)."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=("attention",), help="which kernel is swapped")
    parser.add_argument("--backend", required=True, metavar="FILE.py[:NAME]", help="your file, and the class in it")
    add_result_flags(parser)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default here: %(default)s)")
    parser.add_argument("--no-bench", action="store_true", help="check only")
    parser.add_argument("--serve", action="store_true", help="then start a node with it; further flags are the node's")
    args, node_flags = parser.parse_known_args(argv)
    if node_flags and not args.serve:
        parser.error(f"unknown flag {node_flags[0]} (flags of mooncake.py go with --serve)")
    return args, [flag for flag in node_flags if flag != "--"]


def check(backend: AttentionBackend, device: str, quick: bool, console: Console) -> Verdict:
    """Check the whole grid; records one fault per step."""
    verdict = Verdict()
    steps = [(point, "") for point in points(quick)]
    if reads_codes(backend):
        steps += [(point, kv_dtype) for kv_dtype in DTYPES for point in list(points(quick=True))[::3]]
    for point, kv_dtype in track(steps, "checking", console=console, transient=True):
        step = f"{point}, KV in {kv_dtype}" if kv_dtype else str(point)
        try:
            if kv_dtype:
                fault = find_quantized_fault(backend, point, kv_dtype, device)
            else:
                fault = find_fault(backend, point, device)
        except NotImplementedError as refusal:
            if not point.window and not point.soft_cap:
                verdict.faults.append((step, f"NotImplementedError: {refusal}"))
            else:
                verdict.refused += 1
            continue
        except Exception as error:  # any exception of a user's kernel is a fault at this step
            fault = f"{type(error).__name__}: {error}"
        if fault is None:
            verdict.right += 1
        else:
            verdict.faults.append((step, fault))
    return verdict


def built_in(device: str) -> dict[str, AttentionBackend]:
    """The backends that run here, except `reference`, which exists for correctness."""
    found = {}
    for name in sorted(backends.keys() - {"reference"}):
        try:
            found[name] = choose(name, device)
        except ValueError:  # the backend needs another device or package; compare with the others
            continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 = right, 1 = wrong, 2 = no such backend. With --serve the process becomes the node."""
    args, node_flags = parse(argv)
    console = Console(stderr=True, highlight=False)
    torch.set_grad_enabled(False)
    try:
        if not is_file(args.backend):
            raise ValueError(f"--backend {args.backend}: give a file, FILE.py or FILE.py:NAME")
        backend = choose(args.backend, args.device)
    except ValueError as error:
        print(f"playground: {str(error).replace('--attention-backend', '--backend')}", file=sys.stderr)
        return 2
    verdict = check(backend, args.device, args.quick, console)
    if verdict.faults:
        step, fault = verdict.faults[0]
        print(f"{backend.name} is wrong at {len(verdict.faults)} of {verdict.steps} steps. First:")
        print(f"  {step}\n  {fault}")
        return 1
    refused = f", refuses {verdict.refused} with a window or soft cap" if verdict.refused else ""
    print(f"{backend.name} is right at {verdict.right} steps{refused}")
    if not args.no_bench:
        rows = compare(backend, built_in(args.device), args.device, args.quick)
        config = {"benchmark": "playground", "backend": backend.name, "device": args.device, "quick": args.quick}
        report(config | {"threads": torch.get_num_threads(), "torch": torch.__version__}, rows, args.json)
    if args.serve:
        sys.stdout.flush()
        command = [sys.executable, str(ROOT / "mooncake.py"), "--attention-backend", args.backend, *node_flags]
        os.execv(sys.executable, command)
    return 0

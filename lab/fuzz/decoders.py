"""Fuzzes every decoder of foreign bytes: wire frames, gossip, HTTP bodies, GGUF and trace files, and more.

  scripts/tools.py fuzz                          # 10,000 inputs per decoder
  scripts/tools.py fuzz --inputs 200000 --seed 7
  scripts/tools.py fuzz --only "wire frames"     # only one decoder

A decoder must return or raise the errors it declares (lab/fuzz/targets.py); any other outcome is printed with its seed
and input, and the exit code is 1. The same seed makes the same inputs. A short run is part of the tests.
"""

from __future__ import annotations

import gc
import secrets
import tempfile
import time
import tracemalloc
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from lab.bench.common.results import Row, add_result_flags, quicken, write_result
from lab.flag_types import natural, positive
from lab.fuzz.targets import Crash, Target, fuzz, targets


def main(argv: Sequence[str] | None = None) -> int:
    args, parser = parse(argv)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}")
    rows: list[Row] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        chosen = [target for target in targets(Path(folder)) if args.only in (None, target.name)]
        if not chosen:
            parser.error(f"--only {args.only!r}: there are " + ", ".join(t.name for t in targets(Path(folder))))
        for target in chosen:
            crash, seconds, peak, kept = measured(target, args.inputs, seed)
            verdict = "ok" if crash is None else f"CRASH {crash.error!r} on {crash.data.hex()}"
            line = f"{target.name:<20} {args.inputs:>8} inputs {seconds:6.1f} s"
            print(f"{line}  peak {peak / 1e6:6.1f} MB, kept {kept / 1e6:5.2f} MB  {verdict}")
            failed = failed or crash is not None
            rows.append(Row(target.name, "crashes", "inputs", float(crash is not None), note=f"{seconds:.1f} s"))
            rows.append(Row(target.name, "memory kept after all inputs", "MB", round(kept / 1e6, 2)))
    if args.json is not None:
        config = {"benchmark": "fuzz", "inputs_per_decoder": args.inputs, "seed": seed}
        write_result(config, rows, args.json)
    return int(failed)


def parse(argv: Sequence[str] | None) -> tuple[Namespace, ArgumentParser]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=positive, default=10_000, help="inputs per decoder (default: 10000)")
    parser.add_argument("--seed", type=natural, help="default: a new one, printed")
    parser.add_argument("--only", metavar="NAME", help="one decoder")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), inputs=500), parser


def measured(target: Target, inputs: int, seed: int) -> tuple[Crash | None, float, int, int]:
    """(crash, seconds, most bytes held at a time, bytes still held afterwards)."""
    gc.collect()
    tracemalloc.start()
    begun = time.monotonic()
    crash = fuzz(target, inputs, seed)
    seconds, peak = time.monotonic() - begun, tracemalloc.get_traced_memory()[1]
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return crash, seconds, peak, kept

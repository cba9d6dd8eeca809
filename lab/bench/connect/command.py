"""mooncake.store and mooncake.engine of ours next to upstream's wheel, through the same Python calls.

    scripts/bench.py connect [--only store|engine] [--quick] [--json PATH] [--peer-python PATH]

mooncake.store. Ours: three store nodes, clients over shared memory (shm) and with MC_FORCE_TCP=1 (tcp). Upstream: its
master, one process with a segment, clients over TCP. Every put has new keys; every value is compared at the end of each
round. `pieces`: a value of many pieces of memory, as vLLM puts it.

mooncake.engine. Two programs, one of which writes to and reads from registered memory of the other: ours with
MC_FORCE_TCP=1 (tcp) and without (one host: copies between processes), upstream's with protocol tcp, which is also its
best on one host, and memcpy of one thread within a program. One thread calls. Bytes are compared in each round.

Upstream's wheel is installed in the interpreter that --peer-python names. Contenders take turns within each cell, so
that they share the noise of the machine; only ratios within one run are meaningful. A peer that fails is started again
once; in a cell of which it lacks a round it is missing. The result has the goals, and the number of calls of each
contender. Exit code 1: one of ours failed; the cells before it are in the result.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.connect import engine_rows, store_rows
from lab.bench.connect.latencies import verdicts
from lab.bench.transfer.shared import tell
from lab.flag_types import above_zero, positive

PARTS = ("store", "engine")


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("bench.py connect", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one of the two modules")
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each contender per cell (%(default)s)")
    parser.add_argument("--seconds", type=above_zero, default=0.5, help="length of a turn (%(default)s)")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="an interpreter that has upstream's wheel")
    add_result_flags(parser)
    args = quicken(parser.parse_args(argv), rounds=2, seconds=0.1)
    config: dict[str, Any] = {"rounds": args.rounds, "seconds": args.seconds}
    rows: list[Row] = []
    failures: list[str] = []
    broken = ""
    if args.only != "engine":
        config |= {"nodes": store_rows.NODES, "flags": list(store_rows.FLAGS)}
        config["value_bytes"] = list(store_rows.VALUE_BYTES.values())
        with ExitStack() as stack:
            made = store_rows.contenders(stack, args.peer_python)
            broken = keep(rows, store_rows.cells(made, args.rounds, args.seconds, failures))
    if args.only != "store" and not broken:
        with closing(engine_rows.Contenders(args.peer_python, failures)) as contenders:
            broken = keep(rows, engine_rows.cells(contenders, args.rounds, args.seconds))
    goals = verdicts(rows)
    report(config | {"goals": goals, "failures": failures}, rows, args.json)
    tell(goals, {})
    for failure in failures:
        print(f"failed, and started again: {failure}")
    if broken:
        print(f"bench.py connect: one of ours failed: {broken}", file=sys.stderr)
    return 1 if broken else 0


def keep(rows: list[Row], made: Iterable[Row]) -> str:
    """Add the rows while they are measured; returns why no more are, or ""."""
    try:
        for row in made:
            rows.append(row)
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""The transfer engine beside raw memcpy, raw blocking sockets, Mooncake's Transfer Engine and NIXL, in one run.
"stream" is the limit as iperf measures it: the sockets with hot buffers instead of cold arenas.

  scripts/bench_transfer.py --quick
  scripts/bench_transfer.py --peer-python /path/to/venv/bin/python --json results/transfer.json
  scripts/bench_transfer.py --only ours-tcp,sockets --sizes 64K,368K --batches 1

Every contender is two processes over the same two arenas of 512 MB (memfds); calls cycle through all of it in a
shuffled order, so memory is cold and no contender can merge blocks. Contenders take turns cell by cell, in rounds; a
contender is stopped (SIGSTOP) while it is not its turn. The ends of every block of the destination are overwritten
before a cell and the blocks of its first and last call are compared after it. CPU seconds are of both processes.

All connections use the same congestion control, --congestion: as root in a network of the benchmark's own, else the
machine's default. Rows say how many threads each contender kept busy on both ends; ours over shared memory stands
beside memcpy of as many threads.

The peers (mooncake-transfer-engine-non-cuda, nixl-cu12) are looked for in the interpreter --peer-python names. One that
fails is started again, twice at most per cell; one that cannot be started is listed with the reason. A machine drifts
by 20-30 % between minutes: only ratios within one run mean anything.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from benchlib.results import write_result
from transferbench.agent import MODULES, plan
from transferbench.contenders import Contenders, Key
from transferbench.network import one_congestion_control
from transferbench.pairs import Arenas, Pair
from transferbench.verdict import Side, result_rows, size_text, verdicts

SIZES = ("4K", "64K", "368K", "1M", "16M", "64M")
UNITS = {"K": 1 << 10, "M": 1 << 20}
PEERS = ("mooncake-te", "nixl")
STALL_SIZE = 1 << 20  # bytes of a block while the loops are watched

SIDES = (
    Side("ours-shm", "shared memory", ("nixl",), ("memcpy", "memcpy-2")),
    Side("ours-tcp", "TCP", ("mooncake-te",), ("sockets", "stream")),
    Side("ours-tcp-key", "TCP with a cluster key", (), ("sockets",)),
)


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short cells, no 64M: about a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH as JSON")
    parser.add_argument("--congestion", default="reno", help="congestion control of every contender's connections")
    parser.add_argument("--only", metavar="NAMES", help=f"contenders, of {','.join(MODULES)}")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of a block (K, M are binary)")
    parser.add_argument("--batches", default="1,32", help="blocks per call")
    parser.add_argument("--ops", default="read,write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of one cell in one round [0.4; quick: 0.2]")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the peers installed")
    parser.add_argument("--arena-mb", type=int, default=512, help="binary megabytes of each arena")
    args = parser.parse_args(arguments)
    args.names = args.only.split(",") if args.only else list(MODULES)
    if unknown := set(args.names) - set(MODULES):
        parser.error(f"--only {args.only}: no contender {min(unknown)!r}, only {', '.join(MODULES)}")
    if args.seconds is None:
        args.seconds = 0.2 if args.quick else 0.4
    if args.quick:
        args.rounds = 1
        args.sizes = args.sizes.replace(",64M", "")
    try:
        args.sizes = [int(text[:-1]) * UNITS[text[-1]] for text in args.sizes.split(",")]
        args.batches = [int(text) for text in args.batches.split(",")]
    except (KeyError, ValueError):
        parser.error("--sizes are numbers with K or M, --batches are numbers")
    return args


def stalls(args: Namespace, pairs: list[Pair], arenas: Arenas) -> list[dict[str, Any]]:
    """How late our two loops run while eight submissions of 1 MiB blocks are under way."""
    calls = plan(STALL_SIZE, 8, arenas.nbytes)
    out = []
    for pair, op in product([one for one in pairs if one.name.startswith("ours")], args.ops.split(",")):
        order = {"op": op, "size": STALL_SIZE, "calls": calls, "seconds": max(1.0, args.seconds)}
        for role, late in pair.stall(order).items():
            out.append({"contender": pair.name, "op": op, "loop": role, **late})
    return out


def table(names: Sequence[str], cells: dict[Key, dict[str, Any]]) -> str:
    """A line per op, batch and size; a column per contender: GB/s (p50/p99 us; CPU s per GB)."""
    lines = [["op", "batch", "size", *names]]
    for op, size, batch in dict.fromkeys(key[1:] for key in sorted(cells, key=lambda key: (key[1], key[3], key[2]))):
        line = [op, str(batch), size_text(size)]
        for name in names:
            cell = cells.get((name, op, size, batch))
            text = "{gbs:.2f} ({p50_us:.0f}/{p99_us:.0f}; {cpu_s_per_gb:.2f})"
            line.append(text.format(**cell) if cell else "missing")
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def progress(text: str) -> None:
    print(f"\r{text}   ", end="", file=sys.stderr)


def late_rows(late: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How late the loops ran, as rows of benchlib.results."""
    return [
        {
            "case": f"event loop of the {row['loop']} under {row['op']}, {row['contender']}",
            "metric": metric,
            "unit": "ms",
            "ours": row[f"{metric}_ms"],
            "peers": {},
            "limits": {},
            "note": "",
        }
        for row in late
        for metric in ("p99", "max")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        congestion = one_congestion_control(args.congestion)
    except ValueError as error:
        print(f"bench_transfer: {error}", file=sys.stderr)
        return 2
    arenas = Arenas(args.arena_mb << 20)
    grid = [
        (op, size, batch)
        for size, batch, op in product(args.sizes, args.batches, args.ops.split(","))
        if size * batch <= arenas.nbytes
    ]
    pythons = {name: args.peer_python if name in PEERS else sys.executable for name in args.names}
    with ExitStack() as stack:
        contenders = Contenders(pythons, arenas, congestion, stack)
        cells = contenders.measure(grid, args.rounds, args.seconds, progress)
        late = stalls(args, contenders.pairs, arenas)
    print(file=sys.stderr)
    print(table(args.names, cells))
    goals = verdicts(cells)
    for row in goals:
        print(f"{'met  ' if row['met'] else 'short'}  {row['ratio']:6.2f}  goal {row['goal']:7}  {row['what']}")
    for row in late:
        print("loop late {max_ms:.2f} ms at most, p99 {p99_ms:.2f}: {contender} {op}, {loop}".format(**row))
    for name, reason in contenders.missing.items():
        print(f"missing: {name}: {reason}")
    print(f"congestion control: {congestion} for all")
    if args.json is not None:
        config = {
            "argv": sys.argv[1:],
            "rounds": args.rounds,
            "seconds": args.seconds,
            "congestion": congestion,
            "missing": contenders.missing,
            "failures": contenders.failures,
        }
        rows = [*result_rows(cells, SIDES, {"read": "read", "write": "write"}), *late_rows(late)]
        write_result(config | {"goals": goals}, rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""The transfer engine beside raw memcpy, raw blocking sockets, Mooncake's Transfer Engine and NIXL, in one run.
"stream" is the limit as iperf measures it: the sockets with hot buffers instead of cold arenas.

  scripts/bench_transfer.py --quick
  scripts/bench_transfer.py --peer-python /path/to/venv/bin/python --json results/transfer.jsonl
  scripts/bench_transfer.py --only ours-tcp,sockets --sizes 64K,368K --batches 1

Every contender is two processes over the same two arenas of 512 MB (memfds); calls cycle through all of it in a
shuffled order, so memory is cold and no contender can merge blocks. Contenders take turns cell by cell, in rounds; a
contender is stopped (SIGSTOP) while it is not its turn. The ends of every block of the destination are overwritten
before a cell and the blocks of its first and last call are compared after it. CPU seconds are of both processes.

The peers (mooncake-transfer-engine-non-cuda, nixl-cu12) are looked for in the interpreter --peer-python names. One that
cannot be started is listed with the reason and has no number. A machine drifts by 20-30 % between minutes: only
ratios within one run mean anything.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from benchlib.portable import portable
from benchlib.results import commit, machine
from transferbench.agent import MODULES, plan
from transferbench.pairs import Arenas, Missing, Pair
from transferbench.verdict import size_text, verdicts

SIZES = ("4K", "64K", "368K", "1M", "16M", "64M")
UNITS = {"K": 1 << 10, "M": 1 << 20}
PEERS = ("mooncake-te", "nixl")
STALL_SIZE = 1 << 20  # bytes of a block while the loops are watched

Key = tuple[str, str, int, int]  # contender, op, size, batch


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short cells, no 64M: about a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write one JSON object per cell to PATH")
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


def started(args: Namespace, arenas: Arenas, stack: ExitStack) -> tuple[list[Pair], dict[str, str]]:
    """The contenders that run here, and why the others do not."""
    pairs: list[Pair] = []
    missing: dict[str, str] = {}
    for name in args.names:
        python = args.peer_python if name in PEERS else sys.executable
        try:
            if python is None:
                raise Missing("name an interpreter that has it with --peer-python")
            pairs.append(stack.enter_context(Pair(name, python, arenas)))
        except Missing as error:
            missing[name] = str(error)
            print(f"missing: {name}: {error}", file=sys.stderr)
    return pairs, missing


def measure(args: Namespace, pairs: list[Pair], arenas: Arenas, missing: dict[str, str]) -> dict[Key, dict[str, Any]]:
    """Medians over the rounds."""
    runs: dict[Key, list[dict[str, Any]]] = {}
    grid = [
        (size, batch, op)
        for size, batch, op in product(args.sizes, args.batches, args.ops.split(","))
        if size * batch <= arenas.nbytes
    ]
    for number, (round_, (size, batch, op)) in enumerate(product(range(args.rounds), grid), 1):
        print(f"\r{number}/{args.rounds * len(grid)} {op} {size_text(size)} x{batch}   ", end="", file=sys.stderr)
        turn = (number + round_) % len(pairs)
        for pair in pairs[turn:] + pairs[:turn]:
            if pair.name in missing:
                continue
            try:
                result = pair.cell(op, size, batch, args.seconds)
            except (Missing, OSError) as error:
                missing[pair.name] = str(error)
                print(f"\nmissing from here on: {pair.name}: {error}", file=sys.stderr)
                continue
            runs.setdefault((pair.name, op, size, batch), []).append(result)
    print(file=sys.stderr)
    return {key: _median(results) for key, results in runs.items()}


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [result["gbs"] for result in results]
    middle = {name: median(result[name] for result in results) for name in results[0] if name != "n"}
    return middle | {"n": sum(result["n"] for result in results), "gbs_min": min(speeds), "gbs_max": max(speeds)}


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


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    arenas = Arenas(args.arena_mb << 20)
    with ExitStack() as stack:
        pairs, missing = started(args, arenas, stack)
        cells = measure(args, pairs, arenas, missing)
        late = stalls(args, pairs, arenas)
    print(table(args.names, cells))
    goals = verdicts(cells)
    for row in goals:
        print(f"{'met  ' if row['met'] else 'short'}  {row['ratio']:6.2f}  goal {row['goal']:7}  {row['what']}")
    for row in late:
        print("loop late {max_ms:.2f} ms at most, p99 {p99_ms:.2f}: {contender} {op}, {loop}".format(**row))
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    if args.json is not None:
        head = {
            "config": {"argv": portable(sys.argv[1:]), "machine": machine()},
            "commit": commit(),
            "missing": missing,
        }
        rows = [
            {"peer": peer, "op": op, "size": size, "batch": batch, "threads": 1, **cell}
            for (peer, op, size, batch), cell in cells.items()
        ]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in [head, *rows, *late, *goals]))
        print(f"written: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

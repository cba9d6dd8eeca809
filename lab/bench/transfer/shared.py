"""The common parts of the benchmarks transfer and store: flags of the grid, the table, the goals."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lab.bench.common.peer_python import add_peer_python, python_of
from lab.bench.common.results import add_result_flags, columns
from lab.bench.transfer.contenders import Contenders, Key
from lab.bench.transfer.network import one_congestion_control
from lab.bench.transfer.pairs import Arenas, Pair
from lab.bench.transfer.verdict import size_text
from lab.flag_types import above_zero, positive

UNITS = {"K": 1 << 10, "M": 1 << 20}
CELL = "{gbs:.2f} ({p50_us:.0f}/{p99_us:.0f}; {cpu_s_per_gb:.2f})"


def grid_parser(doc: str | None, names: Iterable[str], peers: Sequence[str], sizes: Sequence[str]) -> ArgumentParser:
    """A parser for contenders `names`, which all take part by default; `peers` are those from other projects. `doc` is
    the text of --help."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--congestion", default="reno", help="congestion control of every contender's connections")
    parser.add_argument("--only", default=",".join(names), metavar="NAMES", help="contenders (default: %(default)s)")
    parser.add_argument("--sizes", default=",".join(sizes), help="sizes of a block (K, M are binary)")
    parser.add_argument("--batches", default="1,32", help="blocks per call")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=above_zero, help="seconds of one cell in one round [0.4; quick: 0.2]")
    add_peer_python(parser, peers)
    parser.add_argument(
        "--arena-mb", type=positive, default=512, help="binary megabytes of each arena, at least 32 blocks"
    )
    return parser


def parsed(parser: ArgumentParser, arguments: Sequence[str] | None, known: Iterable[str]) -> Namespace:
    """`names`, `sizes` (bytes) and `batches` as lists, `seconds` and `rounds` adjusted by --quick."""
    args = parser.parse_args(arguments)
    args.names = args.only.split(",")
    if unknown := set(args.names) - set(known):
        parser.error(f"--only {args.only}: no contender {min(unknown)!r}, only {', '.join(known)}")
    args.seconds = args.seconds or (0.2 if args.quick else 0.4)
    args.rounds = 1 if args.quick else args.rounds
    try:
        args.sizes = [int(text[:-1]) * UNITS[text[-1:]] for text in args.sizes.split(",")]
        args.batches = [int(text) for text in args.batches.split(",")]
    except (KeyError, ValueError):
        parser.error("--sizes are numbers with K or M, --batches are numbers")
    if min(*args.sizes, *args.batches) < 1:
        parser.error("--sizes and --batches must be at least 1")
    return args


@dataclass(frozen=True, slots=True)
class Measured:
    """The cells of one run, what `more` measured, and the configuration in the result."""

    cells: dict[Key, dict[str, Any]]
    more: list[dict[str, Any]]
    missing: Mapping[str, str]
    config: dict[str, Any]


def measured(
    args: Namespace,
    peers: Sequence[str],
    ops: Sequence[str],
    calls: int,
    on_cell: Callable[[str], None],
    more: Callable[[list[Pair], Arenas], list[dict[str, Any]]] = lambda pairs, arenas: [],
) -> Measured:
    """All cells of the contenders that --only names, where `calls` calls fit into an arena. Raises ValueError for an
    unknown --congestion."""
    congestion = one_congestion_control(args.congestion)
    arenas = Arenas(args.arena_mb << 20)
    cells = [
        (op, size, batch)
        for size, batch, op in product(args.sizes, args.batches, ops)
        if calls * size * batch <= arenas.nbytes
    ]
    ours = Path(sys.executable)
    pythons = {name: python_of(args, name) if name in peers else ours for name in args.names}
    with ExitStack() as stack:
        contenders = Contenders(pythons, arenas, congestion, stack)
        found = contenders.measure(cells, args.rounds, args.seconds, on_cell)
        rest = more(contenders.pairs, arenas)
    config = {"argv": sys.argv[1:], "rounds": args.rounds, "seconds": args.seconds, "congestion": congestion}
    config |= {"missing": contenders.missing, "failures": contenders.failures}
    return Measured(found, rest, contenders.missing, config)


def table(names: Sequence[str], cells: Mapping[Key, Mapping[str, Any]], verbs: Mapping[str, str]) -> str:
    """One line per operation, batch and size; one column per contender: GB/s (p50/p99 us; CPU s per GB)."""
    lines = [["op", "batch", "size", *names]]
    for op, size, batch in dict.fromkeys(key[1:] for key in sorted(cells, key=lambda key: (key[1], key[3], key[2]))):
        found = (cells.get((name, op, size, batch)) for name in names)
        lines.append(
            [verbs[op], str(batch), size_text(size), *(CELL.format(**cell) if cell else "-" for cell in found)]
        )
    return columns(lines, range(len(lines[0])))


def tell(goals: Sequence[Mapping[str, Any]], missing: Mapping[str, str]) -> None:
    """Print which goals are met and which contenders are missing."""
    for row in goals:
        print(f"{'met  ' if row['met'] else 'short'}  {row['ratio']:6.2f}  goal {row['goal']:7}  {row['what']}")
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")

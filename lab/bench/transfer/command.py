"""The transfer engine against raw memcpy, raw blocking sockets, Mooncake's Transfer Engine and NIXL, in one run.
"stream" is the limit as iperf measures it: the sockets with hot buffers instead of cold arenas.

  scripts/bench.py transfer --quick
  scripts/bench.py transfer --peer-python /path/to/venv/bin/python --json results/transfer.json
  scripts/bench.py transfer --peer-python mooncake-te=/a/bin/python --peer-python nixl=/b/bin/python
  scripts/bench.py transfer --only ours-tcp,sockets --sizes 64K,368K --batches 1

ours-tcp-key is ours-tcp with a cluster key: every byte is encrypted and authenticated (net/channel/sealed_stream.py).
Its limit is ours-tcp in the same run.

Every contender is two processes over the same two arenas of 512 MB (memfds); calls cycle through all of it in a
shuffled order, so memory is cold and no contender can merge blocks. Contenders take turns cell by cell, in rounds;
SIGSTOP pauses a contender between its turns. The ends of every block of the destination are overwritten before a cell
and the blocks of its first and last call are compared after it. CPU seconds cover both processes.

All connections use the same congestion control: as root --congestion, in a separate network namespace, else the
machine's default. Rows show the number of threads that each contender kept busy on both ends; ours over shared memory
is compared with memcpy of as many threads.

The peers (mooncake-transfer-engine-non-cuda, nixl-cu12) run in the interpreters that --peer-python names. A contender
that fails is restarted, at most twice per cell; one that cannot be started is listed with the reason. A machine drifts
by 20-30 % between minutes: only ratios within one run are meaningful.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from lab.bench.common.results import Row, write_result
from lab.bench.transfer.agent import MODULES, plan
from lab.bench.transfer.pairs import Arenas, Pair
from lab.bench.transfer.shared import grid_parser, measured, parsed, table, tell
from lab.bench.transfer.verdict import Side, result_rows, verdicts

SIZES = ("4K", "64K", "368K", "1M", "16M", "64M")
PEERS = ("mooncake-te", "nixl")
STALL_SIZE = 1 << 20  # bytes of a block while the event loops are measured
QUICK_MOST = 16 << 20
VERBS = {"read": "read", "write": "write"}

SIDES = (
    Side("ours-shm", "shared memory", ("nixl",), ("memcpy", "memcpy-2")),
    Side("ours-tcp", "TCP", ("mooncake-te",), ("sockets", "stream")),
    Side("ours-tcp-key", "TCP with a cluster key", (), ("ours-tcp", "sockets")),
)


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = grid_parser(__doc__, MODULES, PEERS, SIZES)
    parser.add_argument("--ops", default="read,write", help="operations (default: %(default)s)")
    args: Namespace = parsed(parser, arguments, MODULES)
    if unknown := set(args.ops.split(",")) - set(VERBS):
        parser.error(f"--ops {args.ops}: no operation {min(unknown)!r}, only {', '.join(VERBS)}")
    if args.quick:
        args.sizes = [size for size in args.sizes if size <= QUICK_MOST]
    return args


def stalls(args: Namespace, pairs: Sequence[Pair], arenas: Arenas) -> list[dict[str, Any]]:
    """How late our two event loops run during eight concurrent submissions of 1 MiB blocks."""
    calls = plan(STALL_SIZE, 8, arenas.nbytes)
    out = []
    for pair, op in product([one for one in pairs if one.name.startswith("ours")], args.ops.split(",")):
        order = {"op": op, "size": STALL_SIZE, "calls": calls, "seconds": max(1.0, args.seconds)}
        for role, late in pair.stall(order).items():
            out.append({"contender": pair.name, "op": op, "loop": role, **late})
    return out


def progress(text: str) -> None:
    print(f"\r{text}   ", end="", file=sys.stderr)


def late_rows(late: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of the loops' delays."""
    return [
        Row(f"event loop of the {row['loop']} under {row['op']}, {row['contender']}", metric, "ms", row[f"{metric}_ms"])
        for row in late
        for metric in ("p99", "max")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        run = measured(args, PEERS, args.ops.split(","), 1, progress, partial(stalls, args))
    except ValueError as error:
        print(f"scripts/bench.py transfer: {error}", file=sys.stderr)
        return 2
    print(file=sys.stderr)
    print(table(args.names, run.cells, VERBS))
    goals = verdicts(run.cells)
    tell(goals, run.missing)
    for row in run.more:
        print("loop late {max_ms:.2f} ms at most, p99 {p99_ms:.2f}: {contender} {op}, {loop}".format(**row))
    print(f"congestion control: {run.config['congestion']} for all")
    if args.json is not None:
        rows = [*result_rows(run.cells, SIDES, VERBS), *late_rows(run.more)]
        write_result(run.config | {"goals": goals}, rows, args.json)
    return 0

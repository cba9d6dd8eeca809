"""The pooled store, upstream's store and the limits of this machine, in one run.

    scripts/bench.py store [--quick] [--json PATH] [--peer-python PATH]    memory: put and get of 1 and 32 blocks
    scripts/bench.py store --disk DIR [--quick] [--json PATH]              the SSD tier on both media, next to fio

Contenders in memory, each two processes on this host: memcpy (libc, one thread or two) and sockets (blocking, plain
Python) are the limits; store-shm and store-tcp are cache.store.store; mooncake-store is upstream's (its master, one
holder, one client; installed in the interpreter that --peer-python names). Every put has new keys and goes into an
empty store that has room for the whole cell, so no store evicts; every get finds its block in DRAM of the other
process. A contender that fails is restarted, at most twice per cell; all have equal rounds and the same congestion
control. The content is compared at the ends of each cell. Checksums are on in ours, off in upstream's (its default).
Hosts drift by 20-30 %: only ratios within one run are meaningful.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lab.bench.common.results import report, write_result
from lab.bench.transfer.shared import grid_parser, measured, parsed, table, tell
from lab.bench.transfer.verdict import BLOCK, KIB, MEMCPY, Goal, Side, result_rows, verdicts

SIZES = ("4K", "64K", "368K", "1M", "16M", "64M")
NAMES = ("memcpy", "memcpy-2", "sockets", "store-shm", "store-tcp", "mooncake-store")
PEERS = ("mooncake-store",)
PLAIN = ("store-shm-plain", "store-tcp-plain")  # without checksums; only by --only

GOALS = (
    Goal("store-shm", "mooncake-store", 3.0, ops=("read",)),
    Goal("store-shm", MEMCPY, 0.9),
    Goal("store-tcp", "mooncake-store", 1.3),
    Goal("store-tcp", "sockets", 0.9),
    Goal("store-shm", "mooncake-store", 5.0, 4 * KIB, 4 * KIB, (32,), ("read",)),
)

SIDES = (
    Side("store-shm", "shared memory", ("mooncake-store",), ("memcpy", "memcpy-2")),
    Side("store-tcp", "TCP", ("mooncake-store",), ("sockets",)),
)

VERBS = {"read": "get", "write": "put"}

CALLS_OF_A_CELL = 5
"""At least this many calls fit into an arena: one to warm up, two that are checked, and some to measure."""


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = grid_parser(__doc__, NAMES, PEERS, SIZES)
    parser.add_argument("--disk", type=Path, metavar="DIR", help="measure the SSD tier and fio in DIR instead")
    args: Namespace = parsed(parser, arguments, (*NAMES, *PLAIN))
    return args


def disk(args: Namespace) -> int:
    """The SSD tier next to fio on the same file system."""
    from cache.ssd import backends
    from lab.bench.transfer.disk import NextToFio, goals

    blocks = 128 if args.quick else 1024
    args.disk.mkdir(parents=True, exist_ok=True)
    media = [NextToFio(args.disk, blocks, backend) for backend in backends]
    for number in range(args.rounds):
        for medium in media:
            medium.measure(number)
    rows = [row for medium in media for row in medium.rows()]
    judged = goals(rows)
    report({"argv": sys.argv[1:], "blocks": blocks, "rounds": args.rounds, "goals": judged}, rows, args.json)
    missing = next((medium.missing for medium in media if medium.missing), "")
    tell(judged, {"fio": missing} if missing else {})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.disk is not None:
        return disk(args)
    try:
        run = measured(args, PEERS, ("write", "read"), CALLS_OF_A_CELL, lambda text: None)
    except ValueError as error:
        print(f"scripts/bench.py store: {error}", file=sys.stderr)
        return 2
    print(table(args.names, run.cells, VERBS))
    goals = verdicts(run.cells, GOALS)
    tell(goals, run.missing)
    if args.json is not None:
        write_result(run.config | {"block": BLOCK, "goals": goals}, result_rows(run.cells, SIDES, VERBS), args.json)
    return 0

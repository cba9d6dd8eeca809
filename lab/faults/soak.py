#!/usr/bin/env python3
"""soak_store: the store under load and under harm, for as long as asked. It ends with 1 when something was wrong.

    soak_store.py --minutes 30            mixed load on three nodes: wrong bytes, and what grows: memory, slots, fds
    soak_store.py --kills 100             kill -9 at random points of writing, each followed by reading everything back
    soak_store.py --holders 5             a holder killed, or stopped, while its values are read: the longest get
    soak_store.py --flips 100             bits flipped anywhere in the files of an SSD tier that is down

A wrong byte is a failure always; after kill -9 so is a value that was acknowledged as flushed and is missing, unless
newer ones had evicted it. --backend file: the same for the other SSD backend.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache.arena import checksum
from cache.ssd import New, SsdTier, backends
from lab.bench.common.results import Row, numbers, write_result

ROOT = Path(__file__).resolve().parents[2]

SLOT = 20_000  # bytes: several pages, and not a whole number of them
MAP = 4 << 20
BATCH = 3  # values written together; so many may have been evicted for those that were not written any more
READABLE = 2  # starts after which a damaged tier serves again at the latest


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def life(directory: str, first: int, backend: str) -> None:
    """One life of a tier, in a process of its own: say what is readable, then write from `first` on until killed, and
    say what has been written."""
    tier = SsdTier(directory, SLOT, MAP, b"soak", backend=backend)
    into = bytearray(SLOT)
    here, wrong = [], 0
    for key in sorted(tier.all_keys()):  # which keeps them in the order of their age
        i = int.from_bytes(key, "big")
        found = tier.get(key, into)
        if found is not None:
            here.append(i)
            wrong += bytes(into) != content(i)
    print(json.dumps({"here": here, "wrong": wrong, "capacity": tier.capacity}), flush=True)
    while True:
        rows = [New(key_of(i), content(i), checksum(content(i))) for i in range(first, first + BATCH)]
        if all(tier.put_many(rows)):
            first += len(rows)
        else:
            time.sleep(0.01)  # damaged: it goes on failing until it is started again
        print(first, flush=True)


class Life:
    """That process, seen from outside."""

    def __init__(self, directory: Path, first: int, backend: str) -> None:
        command = [sys.executable, "-m", "lab.faults.soak", "--life", str(directory), str(first), backend]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.died = False  # by itself, before `kill`

    def report(self) -> dict[str, Any] | None:
        """What was readable at its start; None when it died of what it read."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def kill(self, after_s: float) -> int:
        """Kill it in the middle of its writing; returns where it was, 0 when it had written nothing."""
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        time.sleep(after_s)
        self.died = self.process.poll() is not None
        self.process.send_signal(signal.SIGKILL)
        lines = [first, *self.process.stdout.read().splitlines(keepends=True)]
        self.process.wait()
        self.process.stdout.close()
        return max([int(line) for line in lines if line.endswith("\n")], default=0)


def kills(times: int, directory: Path, seed: int, backend: str) -> dict[str, int]:
    """Counts over all lives: values read back, wrong bytes, flushed values that were missing."""
    rng = random.Random(seed)
    counts = {"lives": 0, "read": 0, "wrong": 0, "lost": 0}
    written = 0
    for _ in range(times + 1):
        one = Life(directory, written, backend)
        report = one.report()
        if report is None:
            one.kill(0)
            counts["lost"] += written
            break
        here = set(report["here"])
        newest = max(here, default=-1)  # one more may be there than was said
        expected = range(max(0, newest + 1 - report["capacity"] + BATCH), written)
        counts["lives"] += 1
        counts["read"] += len(here)
        counts["wrong"] += report["wrong"]
        counts["lost"] += sum(i not in here for i in expected)
        written = max(written, one.kill(rng.random() * 0.05))
    return counts


def damage(directory: Path, rng: random.Random) -> None:
    """1 to 64 bits, half of them in LMDB's first pages or in the table, which are small and matter most."""
    blocks, small = directory / "data.mdb", 16 * 4096
    if not blocks.exists():
        blocks = directory / "slots" if rng.random() < 0.5 else directory / "table"
    size = blocks.stat().st_size
    with blocks.open("r+b") as file:
        for _ in range(rng.randint(1, 64)):
            at = rng.randrange(size if rng.random() < 0.5 else min(small, size))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def flips(times: int, directory: Path, seed: int, backend: str) -> dict[str, int]:
    """Damage a tier that is down, start it, count. `deaths`: starts that ended the process, or lives that died of it
    later; `stuck`: damages after which it did not serve within READABLE starts."""
    rng = random.Random(seed)
    counts = {"flips": 0, "read": 0, "wrong": 0, "deaths": 0, "stuck": 0}
    written = 0
    one = Life(directory, 0, backend)
    one.report()
    for _ in range(times):
        written = max(written, one.kill(rng.random() * 0.02))
        counts["deaths"] += one.died
        damage(directory, rng)
        counts["flips"] += 1
        for _ in range(READABLE):
            one = Life(directory, written, backend)
            report = one.report()
            if report is not None:
                counts["read"] += len(report["here"])
                counts["wrong"] += report["wrong"]
                break
            one.kill(0)
            counts["deaths"] += 1
        else:
            counts["stuck"] += 1
            return counts
    one.kill(0)
    return counts


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0, metavar="TIMES")
    parser.add_argument("--flips", type=int, default=0, metavar="TIMES")
    parser.add_argument("--holders", type=int, default=0, metavar="TIMES")
    parser.add_argument("--rate", type=float, default=50.0, help="calls per second of the mixed load")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH")
    parser.add_argument("--backend", choices=sorted(backends), default="lmdb", help="of the SSD tier")
    parser.add_argument(
        "--life", nargs=3, metavar=("DIR", "FIRST", "BACKEND"), help="a process of --kills; for this script itself"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.life:
        life(args.life[0], int(args.life[1]), args.life[2])
        return 0
    print(f"seed {args.seed}", flush=True)
    rows: list[Row] = []
    bad = 0
    for name, harm, times in (("kills", kills, args.kills), ("flips", flips, args.flips)):
        if times:
            with tempfile.TemporaryDirectory(prefix="soak-store-", dir=os.environ.get("TMPDIR")) as home:
                counts = harm(times, Path(home) / "ssd", args.seed, args.backend)
            print(f"{name}: {counts}", flush=True)
            rows += numbers(f"{name}, {args.backend}", counts)
            bad += counts["wrong"] + counts.get("lost", 0) + counts.get("stuck", 0)
    if args.holders:
        from lab.faults.soak_holders import report

        found = report(args.seed, args.holders)
        rows += [row for one in found for row in numbers(f"{one['what']}, {one['replicas']} copies", one)]
        bad += sum(row["wrong"] + (row["misses"] if row["replicas"] > 1 else 0) for row in found)
    if args.minutes:
        from lab.faults.soak_load import soak  # heavier, and not needed by a life

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")  # what the client says
        mixed = soak(args.minutes * 60, args.rate, args.seed)
        rows += numbers("soak", mixed)
        bad += mixed["wrong"] + mixed["leaks"]
    if args.json is not None:
        write_result({"argv": sys.argv[1:], "seed": args.seed}, rows, args.json)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

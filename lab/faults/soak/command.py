"""The store under load and under faults, for a given time. Exit code 1 if a check failed.

    scripts/faults.py soak --minutes 30       mixed load on three nodes: wrong bytes, and growth of memory, slots, fds
    scripts/faults.py soak --kills 100        kill -9 at random points of writing, then everything is read back
    scripts/faults.py soak --holders 5        kills or stops a holder while clients read its values: the longest get
    scripts/faults.py soak --flips 100        flips bits anywhere in the files of a stopped SSD tier
    scripts/faults.py soak --quick            a small run of all of these, under two minutes

A wrong byte is always a failure. After kill -9, so is a missing value that was acknowledged as flushed, unless newer
values had evicted it. --backend file: the same for the other SSD backend.
"""

from __future__ import annotations

import logging
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from cache.ssd import backends
from lab.bench.common.results import numbers
from lab.faults.runner import Run, Scenario, run
from lab.faults.soak.holders import harmed_holders
from lab.faults.soak.load import soak
from lab.faults.soak.tier import flips, kills
from lab.flag_types import above_zero, natural, not_negative

QUICK = {"kills": 5, "flips": 5, "holders": 1, "minutes": 0.2}


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=not_negative, default=0.0)
    parser.add_argument("--kills", type=natural, default=0, metavar="TIMES")
    parser.add_argument("--flips", type=natural, default=0, metavar="TIMES")
    parser.add_argument("--holders", type=natural, default=0, metavar="TIMES")
    parser.add_argument("--rate", type=above_zero, default=50.0, help="calls per second of the mixed load")
    parser.add_argument("--backend", choices=sorted(backends), default="lmdb", help="backend of the SSD tier")
    parser.set_defaults(seed=random.SystemRandom().randrange(1 << 32))


def check(args: Namespace) -> None:
    """Raises ValueError if there is nothing to do: that would pass."""
    if not args.quick and not any(getattr(args, name) for name in QUICK):
        raise ValueError(f"give one of {', '.join(f'--{name}' for name in QUICK)}, or --quick for some of each")


def play(this: Run) -> None:
    args = this.args
    if args.quick and not any(getattr(args, name) for name in QUICK):
        vars(args).update(QUICK)
    for name, harm, times in (("kills", kills, args.kills), ("flips", flips, args.flips)):
        if times:
            counts = harm(times, this.folder() / "ssd", args.seed, args.backend)
            _note(this, f"{name}, {args.backend}", counts, ("wrong", "lost", "failed", "stuck"))
    for found in harmed_holders(this, args.seed, args.holders) if args.holders else ():
        bad = ("wrong", "misses") if found["replicas"] > 1 else ("wrong",)
        _note(this, f"{found['what']}, {found['replicas']} copies", found, bad)
    if args.minutes:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")  # the client's log
        _note(this, "soak", soak(this, args.minutes * 60, args.rate, args.seed), ("wrong", "leaks"))


def _note(this: Run, case: str, counts: Mapping[str, Any], bad: tuple[str, ...]) -> None:
    """Rows of all counts; those of `bad` must be zero."""
    print(f"{case}: {dict(counts)}", flush=True)
    this.rows += numbers(case, counts)
    this.wrong += [f"{case}: {counts[name]} {name}" for name in bad if counts.get(name)]


main = partial(run, Scenario(__doc__, add_flags, play, check=check, quick=QUICK))

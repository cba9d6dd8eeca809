#!/usr/bin/env python3
"""Every table of the Mooncake papers that public data allows, ours beside theirs, as one Markdown report with plots.

  scripts/reproduce.py                      # all ablations, into reproduce/report.md
  scripts/reproduce.py --out DIR --only scheduling,pool,ratio
  scripts/reproduce.py --quick              # short runs, to see that everything works

The traces are the released ones where ../shared/traces has them, else generated ones: the report says which. The hit
rates of cache policies are scripts/cache_policies.py, which the report runs first.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without installing

from rich.console import Console

from scripts import ablate, cache_policies
from scripts.benchlib.results import commit
from scripts.lab.ablation import Goal
from scripts.lab.ablations import ABLATIONS
from scripts.lab.plot import draw
from scripts.lab.tables import goal_table, section

QUICK_REQUESTS = 400


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("reproduce"), help="folder of the report (default: reproduce)")
    made.add_argument("--only", metavar="NAMES", help="some of: " + ", ".join(ABLATIONS))
    made.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, one seed, no cache policies")
    ablate.add_flags(made)
    return made


def policies_section() -> str:
    """The table of cache policies, as its script prints it."""
    out = StringIO()
    with redirect_stdout(out):
        code = cache_policies.main([])
    verdict = "within tolerance of the reference rates" if code == 0 else "NOT within tolerance of the reference rates"
    return f"## Cache policies: hit rates by capacity\n\nLRU, LFU and FIFO are {verdict}.\n\n```\n{out.getvalue()}```\n"


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    names = args.only.split(",") if args.only else list(ABLATIONS)
    if unknown := set(names) - set(ABLATIONS):
        made.error(f"--only: no ablation called {', '.join(sorted(unknown))}; there are {', '.join(ABLATIONS)}")
    requests, seeds = (QUICK_REQUESTS, 1) if args.quick else (args.requests, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    args.requests, args.seeds = requests, seeds
    head = f"# Figures of the Mooncake papers, reproduced\n\nCommit {commit()}; {seeds} seeds per case; simulated.\n"
    begun, console = time.monotonic(), Console(stderr=True)
    report = args.out / "report.md"
    parts: list[str] = []
    goals: list[Goal] = []
    if not args.quick and not args.only:
        console.print("cache policies ...")
        parts.append(policies_section())
    for outcome in ablate.run_all(names, args, console):
        name = outcome.ablation.name
        goals += ablate.reached(outcome)
        plot = args.out / f"{name}.svg"
        draw(outcome, plot)
        parts.append(section(outcome, plot.name))
        ablate.write_json(outcome, args.out / f"{name}.json", seeds)
        reached = [f"## What was to be reached\n\n{goal_table(goals)}\n"] if goals else []
        report.write_text("\n".join([head, *reached, *parts]))  # as far as it has come
    console.print(f"{report} in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

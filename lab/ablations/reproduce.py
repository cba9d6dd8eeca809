"""Every table of the Mooncake papers that public data allows, with our values and theirs. Writes one Markdown report
with plots.

  scripts/reproduce.py                      # what has a value of a paper or a goal, into reproduce/report.md
  scripts/reproduce.py --all                # all ablations
  scripts/reproduce.py --out DIR --only scheduling,pool,ratio
  scripts/reproduce.py --rivals             # the rivals of 2025-26 in one table, also printed
  scripts/reproduce.py --quick              # short runs, to check that everything works

The traces are the released ones if ../shared/traces has them, else generated ones: the report says which. The report
also has hit rates without timing, by policy (scripts/tools.py cache-policies) and by size. Each ablation writes a .json
with every seed's figures and the configurations; report.json has their means in one file, with the commit and the
minutes taken, also those of the processors. All runs are kept in runs.jsonl.xz.

A report is of one commit without changes; only --quick accepts others. --resume continues a run of the same commit that
was stopped: runs.jsonl has the finished simulations.
"""

from __future__ import annotations

import resource
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.ablations import command as ablate
from lab.ablations import curve
from lab.ablations.common import own_policies
from lab.ablations.common.ablation import Goal, Outcome
from lab.ablations.common.own_policies import with_own
from lab.ablations.common.plot import draw
from lab.ablations.common.runs import Runs
from lab.ablations.common.tables import goal_table, section
from lab.ablations.rivals.table import TABLE
from lab.ablations.simulated import ABLATIONS
from lab.bench.common.results import commit, write_result
from lab.caches import command as cache_policies
from lab.caches.targets import CAPACITIES, TOLERANCE
from lab.one_line import TerseParser, refuse
from lab.simulator.config import SimConfig

QUICK_REQUESTS = 400

CORE = [name for name, one in ABLATIONS.items() if one.paper or one.goals is not None]
"""The ablations of a report without --all: those with values of a paper, or with a goal of this project."""


def parser() -> ArgumentParser:
    made = TerseParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("reproduce"), help="folder of the report (default: reproduce)")
    made.add_argument("--only", metavar="NAMES", help="some of: " + ", ".join(ABLATIONS))
    made.add_argument(
        "--quick", action="store_true", help=f"at most {QUICK_REQUESTS} requests, one seed, no cache policies"
    )
    rest = ", ".join(name for name in ABLATIONS if name not in CORE)
    made.add_argument("--all", action="store_true", help=f"also {rest}")
    made.add_argument("--rivals", action="store_true", help="only the ablation rivals, and print its table")
    made.add_argument("--resume", action="store_true", help="continue a stopped run of this commit")
    ablate.add_flags(made)
    return made


def policies() -> tuple[str, list[Goal]]:
    """The table of cache policies as its script prints it, and its distance from the reference, which has rates for the
    released traces only."""
    made = cache_policies.parser().parse_args([])
    rows = cache_policies.measured(cache_policies.load(made), made.eviction.split(","), CAPACITIES)
    out = StringIO()
    with redirect_stdout(out):
        cache_policies.print_tables(rows, CAPACITIES)
    apart, wrong = cache_policies.differences(rows), cache_policies.disagreements(rows)
    verdict = f"LRU, LFU and FIFO are at most {max(apart):.4f} from the reference rates." if apart else "No reference."
    text = "\n\n".join(["## Cache policies: hit rates by capacity", verdict, *wrong, f"```\n{out.getvalue()}```\n"])
    if not apart:
        return text, []
    goal = "v3 Table 1: block hit rates of LRU, LFU and FIFO from the reference's, most"
    return text, [Goal(goal, f"<= {TOLERANCE:g}", f"{max(apart):.4f}", not wrong)]


def replays() -> tuple[list[str], list[Goal]]:
    """Sections that need no simulator, and the goals they answer."""
    text, goals = policies()
    return [text, curve.section()], goals


def cases_of(outcome: Outcome[Any]) -> dict[str, Any]:
    """The settings of each case that differ from the defaults."""
    return {case.label: case.brief() | {"requests": outcome.raw[case.label][0]["requests"]} for case in outcome.cases}


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    if args.rivals + args.all + bool(args.only) > 1:
        made.error("--rivals, --all and --only each choose the ablations: give one of them")
    names = (
        [TABLE.name] if args.rivals else args.only.split(",") if args.only else list(ABLATIONS) if args.all else CORE
    )
    if unknown := set(names) - set(ABLATIONS):
        made.error(f"--only: no ablation called {', '.join(sorted(unknown))}; there are {', '.join(ABLATIONS)}")
    if args.quick:
        args.requests, args.seeds = min(args.requests or QUICK_REQUESTS, QUICK_REQUESTS), 1
    begun, used_s, console, came = time.monotonic(), processor_s(), Console(stderr=True), commit()
    try:
        own_policies.check(args)
    except (OSError, ValueError) as error:
        refuse(console, "reproduce", error)
        return 2
    if not args.quick and (problem := unclean(came)):
        made.error(problem)
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1) as replaying:
        untimed = None if args.quick or args.only or args.rivals else replaying.submit(replays)
        report = write(names, args, came, untimed, console, begun)
    if args.rivals:
        print(*report.parts)
    if (now := commit()) != came:
        refuse(console, "reproduce", f"the checkout became {now} while {came} was measured: measure it again")
        return 1
    took_s, cpu_s = time.monotonic() - begun, processor_s() - used_s
    taken = {"minutes": took_s / 60, "processor_minutes": cpu_s / 60, "workers": args.workers}
    write_result(report.config(args) | taken, report.rows, args.out / "report.json")
    console.print(f"{args.out / 'report.md'} in {took_s:.0f} s, {cpu_s:.0f} s of CPU")
    return 0


def processor_s() -> float:
    """Seconds of the processors that this process and its ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return sum(one.ru_utime + one.ru_stime for one in used)


def unclean(came: str) -> str:
    """Why no report can be made of this commit; empty if one can."""
    if came == "unknown":
        return "no commit is known here: a report is of one commit; run it in a git checkout, or use --quick"
    if came.endswith("-dirty"):
        return "files differ from the commit (git status): a report is of one commit; commit them, or use --quick"
    return ""


Untimed = Future[tuple[list[str], list[Goal]]]


@dataclass(slots=True)
class Report:
    """What a report says so far. `made` runs are new, `taken` ones of a stopped run of the same commit."""

    parts: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    cases: dict[str, Any] = field(default_factory=dict)
    made: int = 0
    taken: int = 0

    def config(self, args: Namespace) -> dict[str, Any]:
        """For the result file."""
        asked = {"seeds": args.seeds, "requests": args.requests, "runs": self.made, "runs_from_before": self.taken}
        found = {"cases": self.cases, "goals": [asdict(goal) for goal in self.goals]}
        return asked | {"defaults": SimConfig().as_dict()} | found


def title(names: Sequence[str], came: str, seeds: int, took: str) -> str:
    head = (
        f"Ablations: {', '.join(names)}"
        if not set(names) >= set(CORE)
        else "Figures of the Mooncake papers, reproduced"
    )
    how = (
        f"{seeds} seeds per case (0 to {seeds - 1}), ± half of the 95 % interval" if seeds > 1 else "one seed per case"
    )
    return (
        f"# {head}\n\nCommit {came}; simulated; {how}; {took}.\n\n"
        "A configuration names what is not the simulator's default (in report.json), and what differs between cases.\n"
    )


def write(
    names: Sequence[str], args: Namespace, came: str, untimed: Untimed | None, console: Console, begun: float
) -> Report:
    """Writes the unfinished report after every ablation, and the sections of `untimed` at the end. `came`: the
    commit."""
    file = args.out / "runs.jsonl"
    if not args.resume:
        file.unlink(missing_ok=True)
    runs, report = Runs(file, came, args.requests), Report()

    def save() -> None:
        report.made, report.taken = runs.made, runs.taken
        took = f"{runs.made} runs in {time.monotonic() - begun:.0f} s with {args.workers} processes"
        if runs.taken:
            took += f", {runs.taken} from a start before of the same commit"
        reached = [f"## Goals\n\n{goal_table(report.goals)}\n"] if report.goals else []
        parts = [title(names, came, args.seeds, took), *reached, *report.parts]
        (args.out / "report.md").write_text("\n".join(parts))

    for outcome in ablate.run_all([with_own(ABLATIONS[name], args) for name in names], args, console, runs):
        name = outcome.ablation.name
        report.goals += ablate.reached(outcome)
        plot = args.out / f"{name}.svg"
        draw(outcome, plot)
        report.parts.append(section(outcome, plot.name))
        ablate.write_json(outcome, args.out / f"{name}.json", args.seeds)
        report.cases[name] = cases_of(outcome)
        report.rows += [row | {"ablation": name} for row in ablate.rows_of(outcome.values)]
        save()
    if untimed is not None:
        more, answered = untimed.result()
        report.parts += more
        report.goals += answered
        save()
    runs.pack(args.out / "runs.jsonl.xz")
    return report

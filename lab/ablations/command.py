"""One ablation, simulated or live: a table with 95 % intervals over seeds and the paper's values, and a plot.

  scripts/ablate.py --list                            # their names and questions
  scripts/ablate.py scheduling                        # FAST'25 Fig. 5
  scripts/ablate.py regret --seeds 5 --json regret.json --plot regret.svg
  scripts/ablate.py pool --requests 2000              # a short run
  scripts/ablate.py goals                             # all ablations with goals: the goal, our value, met or not
  scripts/ablate.py overlap --live --seconds 20       # on nodes of the embedded model, started here
  scripts/ablate.py scheduling --live --url a=http://127.0.0.1:8000 --url b=http://127.0.0.1:8100

The simulator runs the placement, queue, rejection and eviction classes of production (lab/simulator/). An ablation is
one file in lab/ablations/simulated/: cases, definitions, the paper's values, and a sentence about the difference.
--live answers some of the questions on real nodes (lab/ablations/live/), one core each. With --url it measures running
clusters; each cluster is one case.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lab.ablations.common.ablation import Estimated, Goal, Outcome, run
from lab.ablations.common.plot import draw
from lab.ablations.common.runs import Runs
from lab.ablations.common.tables import goal_table, section
from lab.ablations.live import run as live
from lab.ablations.live.case import LiveOutcome
from lab.ablations.live.table import LIVE, why_not
from lab.ablations.simulated import ABLATIONS, WITH_GOALS
from lab.bench.common.client import Unreachable
from lab.bench.common.results import write_result
from lab.launch.cluster import NodeDied, StartTimeout

GOALS = "goals"


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("name", nargs="?", choices=[*(ABLATIONS | LIVE), GOALS], metavar="NAME", help="see --list")
    made.add_argument("--list", action="store_true", help="list names and questions")
    add_flags(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="every figure of every seed, with the configuration")
    made.add_argument("--plot", type=Path, metavar="FILE", help="the first metric as .svg or .png")
    made.add_argument("--live", action="store_true", help="on real nodes in place of the simulator")
    made.add_argument("--seconds", type=float, default=20.0, help="--live: seconds of requests per run (default: 20)")
    made.add_argument(
        "--url", type=_label_and_url, action="append", default=[], metavar="LABEL=URL", help="--live: repeatable"
    )
    return made


def _label_and_url(text: str) -> tuple[str, str]:
    label, _, url = text.partition("=")
    if not label or not url.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"expected LABEL=URL, got {text!r}")
    return label, url


def add_flags(made: ArgumentParser) -> None:
    """Flags that `reproduce` shares."""
    made.add_argument("--requests", type=int, metavar="N", help="only the first N requests of each trace")
    made.add_argument("--seeds", type=int, default=3, help="runs per case (default: 3)")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--workers", type=int, default=cores, help=f"processes (default: {cores}, the cores)")


def run_all(names: Sequence[str], args: Namespace, console: Console, kept: Runs | None = None) -> Iterator[Outcome]:
    """Run one after the other, under one progress bar; see lab.ablations.common.ablation.run."""
    with Progress(console=console) as bar:
        total = sum(len(ABLATIONS[name].cases(args.requests)) for name in names) * args.seeds
        task = bar.add_task("", total=total)
        for name in names:
            bar.update(task, description=name)
            yield run(ABLATIONS[name], args.requests, args.seeds, args.workers, lambda: bar.advance(task), kept)


def reached(outcome: Outcome) -> list[Goal]:
    """The goals that this outcome answers."""
    return [] if outcome.ablation.goals is None else outcome.ablation.goals(outcome.values)


def rows_of(values: Mapping[str, Mapping[str, Estimated]]) -> list[dict[str, Any]]:
    """One row per case and metric: the mean over the seeds, and half of its interval."""
    return [
        {"case": case, "metric": metric, "unit": "", "ours": found.mean, "interval": found.half}
        for case, of in values.items()
        for metric, found in of.items()
    ]


def write_json(outcome: Outcome, path: Path, seeds: int) -> None:
    cases = {
        case.label: {
            "config": case.config.as_dict(),
            "model": None if case.model is None else asdict(case.model),
            "speed": case.workload.speed,
            "seeds": outcome.raw[case.label],
        }
        for case in outcome.cases
    }
    ablation = outcome.ablation
    config: dict[str, Any] = {
        "ablation": ablation.name,
        "definition": ablation.definition,
        "trace": outcome.source,
        "seeds": seeds,
        "cases": cases,
    }
    config["goals"] = [asdict(goal) for goal in reached(outcome)]
    write_result(
        config | {"paper": ablation.paper, "reading": ablation.reading(outcome.values)}, rows_of(outcome.values), path
    )


def write_live(outcome: LiveOutcome, path: Path, args: Namespace) -> None:
    cases = {
        case.label: {
            "nodes": case.nodes or case.url,
            "flags": case.flags,
            "workload": case.workload.name,
            "node": outcome.configs[case.label],
            "seeds": outcome.raw[case.label],
        }
        for case in outcome.cases
    }
    about = outcome.ablation
    config = {"ablation": about.name, "live": True, "definition": about.definition, "seconds": args.seconds}
    config |= {"cases": cases, "seeds": args.seeds, "ttft_slo_s": about.ttft_slo_s, "tbt_slo_s": about.tbt_slo_s}
    write_result(config | {"reading": about.reading(outcome.values)}, rows_of(outcome.values), path)


def run_live(args: Namespace, console: Console) -> LiveOutcome:
    """Raises Unreachable, NodeDied, StartTimeout, ValueError."""
    ablation = LIVE[args.name]
    cases = live.at_urls(ablation, args.url) if args.url else list(ablation.cases)
    with Progress(console=console) as bar, tempfile.TemporaryDirectory(prefix="ablate-") as folder:
        task, done = bar.add_task(args.name, total=len(cases) * args.seeds), count()

        def tell(what: str) -> None:
            bar.update(task, description=f"{args.name}: {what}", completed=next(done))

        return live.run(ablation, cases, args.seeds, args.seconds, Path(folder), tell)


def list_all() -> None:
    for name, ablation in ABLATIONS.items():
        print(f"{name:<14} {ablation.question}{' Also --live.' if name in LIVE else ''}")
    for name, one in LIVE.items():
        if name not in ABLATIONS:
            print(f"{name:<14} {one.question} Only --live.")
    print(f"{GOALS:<14} All goals, and whether they are met. ({', '.join(WITH_GOALS)})")


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    console = Console(stderr=True)
    if args.list or args.name is None:
        list_all()
        return 0
    if args.seeds < 1 or args.workers < 1 or not args.seconds > 0:
        made.error("--seeds, --workers and --seconds must be positive")
    if args.url and not args.live:
        made.error("--url needs --live")
    if args.live and args.name not in LIVE:
        made.error(why_not(args.name))
    if not args.live and args.name not in [*ABLATIONS, GOALS]:
        made.error(f"{args.name} has no simulated form: add --live")
    if args.live:
        try:
            found = run_live(args, console)
        except (Unreachable, NodeDied, StartTimeout, ValueError) as error:
            console.print(f"ablate: {error}", style="red", markup=False)
            return 1
        print(section(found.shown()))
        if args.json:
            write_live(found, args.json, args)
        if args.plot:
            draw(found.shown(), args.plot)
        return 0
    names = WITH_GOALS if args.name == GOALS else [args.name]
    if len(names) > 1 and (args.json or args.plot):
        made.error("`goals` runs several ablations: use --json and --plot with one of them, or scripts/reproduce.py")
    goals = []
    for outcome in run_all(names, args, console):
        goals += reached(outcome)
        print(section(outcome))
        if args.json:
            write_json(outcome, args.json, args.seeds)
        if args.plot:
            draw(outcome, args.plot)
    if args.name == GOALS:
        print(goal_table(goals))
    return 0

"""One ablation, simulated or live: a table with 95 % intervals over seeds and the paper's values, and a plot.

  scripts/ablate.py --list                            # their names and questions
  scripts/ablate.py scheduling                        # FAST'25 Fig. 5
  scripts/ablate.py regret --seeds 5 --json regret.json --plot regret.svg
  scripts/ablate.py pool --requests 2000              # a short run
  scripts/ablate.py scheduling --placement mine.py:X  # and a case with your own policy (docs/hacking.md)
  scripts/ablate.py ratio --model-geometry Kimi-K2 --hardware 16xh200   # the same with another model, by formula
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

from lab.ablations.common import own_policies
from lab.ablations.common.ablation import Ablation, Estimated, Goal, Outcome, run_each
from lab.ablations.common.geometry import with_geometry
from lab.ablations.common.own_policies import with_own
from lab.ablations.common.plot import draw
from lab.ablations.common.runs import Runs
from lab.ablations.common.tables import goal_table, section
from lab.ablations.live import run as live
from lab.ablations.live.case import LiveCase
from lab.ablations.live.run import TBT_SLO_S, TTFT_SLO_S
from lab.ablations.live.table import LIVE, why_not
from lab.ablations.simulated import ABLATIONS, WITH_GOALS
from lab.bench.common.client import Unreachable
from lab.bench.common.results import write_result
from lab.flag_types import above_zero, positive
from lab.launch.cluster import NodeDied, StartTimeout
from lab.launch.rest import RestError
from lab.one_line import TerseParser, progress, refuse
from lab.simulator.geometry_flags import add_geometry_flags

GOALS = "goals"


def parser() -> ArgumentParser:
    made = TerseParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("name", nargs="?", choices=[*(ABLATIONS | LIVE), GOALS], metavar="NAME", help="see --list")
    made.add_argument("--list", action="store_true", help="list names and questions")
    add_flags(made)
    add_geometry_flags(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="every figure of every seed, with the configuration")
    made.add_argument("--plot", type=Path, metavar="FILE", help="the first metric as .svg or .png")
    made.add_argument("--live", action="store_true", help="on real nodes in place of the simulator")
    made.add_argument(
        "--seconds", type=above_zero, default=20.0, help="--live: seconds of requests per run (default: 20)"
    )
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
    made.add_argument("--requests", type=positive, metavar="N", help="only the first N requests of each trace")
    made.add_argument("--seeds", type=positive, default=3, help="runs per case (default: 3)")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--workers", type=positive, default=cores, help=f"processes (default: {cores}, the cores)")
    own_policies.add_flags(made)


def run_all(
    ablations: Sequence[Ablation[Any]], args: Namespace, console: Console, kept: Runs | None = None
) -> Iterator[Outcome[Any]]:
    """See lab.ablations.common.ablation.run_each; under one progress bar. Raises OSError, ValueError."""
    with progress(console) as bar:
        total = sum(len(one.cases(args.requests)) for one in ablations) * args.seeds
        task = bar.add_task("", total=total)

        def done(name: str) -> None:
            bar.update(task, description=name, advance=1)

        yield from run_each(ablations, args.requests, args.seeds, args.workers, done, kept)


def chosen(name: str, args: Namespace) -> Ablation[Any]:
    """The ablation, with another model if --model-geometry says so, and a case with the user's policies."""
    ablation = with_own(ABLATIONS[name], args)
    if not args.model_geometry:
        return ablation
    return with_geometry(ablation, args.model_geometry, args.hardware, args.pool_windows, args.state_every)


def reached(outcome: Outcome[Any]) -> list[Goal]:
    """The goals that this outcome answers."""
    return [] if outcome.ablation.goals is None else outcome.ablation.goals(outcome.values)


def rows_of(values: Mapping[str, Mapping[str, Estimated]]) -> list[dict[str, Any]]:
    """One row per case and metric: the mean over the seeds, and half of its interval."""
    return [
        {"case": case, "metric": metric, "unit": "", "ours": found.mean, "interval": found.half}
        for case, of in values.items()
        for metric, found in of.items()
    ]


def write_json(outcome: Outcome[Any], path: Path, seeds: int, more: Mapping[str, Any] | None = None) -> None:
    """`more`: entries of the configuration of a live ablation."""
    about = outcome.ablation
    cases = {case.label: case.as_dict() | {"seeds": outcome.raw[case.label]} for case in outcome.cases}
    for label, node in outcome.nodes.items():
        cases[label]["node"] = node
    config = {"ablation": about.name, "definition": about.definition, "seeds": seeds, "cases": cases}
    config |= more or {"trace": outcome.source, "paper": about.paper, "goals": [asdict(g) for g in reached(outcome)]}
    write_result(config | {"reading": about.reading(outcome.values)}, rows_of(outcome.values), path)


def run_live(args: Namespace, console: Console) -> Outcome[LiveCase]:
    """Raises Unreachable, NodeDied, StartTimeout, RestError, ValueError."""
    ablation = live.at_urls(LIVE[args.name], args.url) if args.url else LIVE[args.name]
    with progress(console) as bar, tempfile.TemporaryDirectory(prefix="ablate-") as folder:
        task, done = bar.add_task(args.name, total=len(ablation.cases(None)) * args.seeds), count()

        def tell(what: str) -> None:
            bar.update(task, description=f"{args.name}: {what}", completed=next(done))

        return live.run(ablation, args.seeds, args.seconds, Path(folder), tell)


def list_all() -> None:
    for name, ablation in ABLATIONS.items():
        print(f"{name:<14} {ablation.question}{' Also --live.' if name in LIVE else ''}")
    for name, one in LIVE.items():
        if name not in ABLATIONS:
            print(f"{name:<14} {one.question} Only --live.")
    print(f"{GOALS:<14} All goals, and whether they are met. ({', '.join(WITH_GOALS)})")


def show(outcome: Outcome[Any], args: Namespace) -> None:
    print(section(outcome))
    if args.json:
        about_live = {"live": True, "seconds": args.seconds, "ttft_slo_s": TTFT_SLO_S, "tbt_slo_s": TBT_SLO_S}
        write_json(outcome, args.json, args.seeds, about_live if args.live else None)
    if args.plot:
        draw(outcome, args.plot)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    console = Console(stderr=True)
    if args.list or args.name is None:
        list_all()
        return 0
    if args.url and not args.live:
        made.error("--url needs --live")
    if args.model_geometry and (args.live or args.name == GOALS):
        made.error("--model-geometry is for one simulated ablation")
    if args.live and args.name not in LIVE:
        made.error(why_not(args.name))
    if not args.live and args.name not in [*ABLATIONS, GOALS]:
        made.error(f"{args.name} has no simulated form: add --live")
    if args.live and own_policies.named(args):
        made.error("policies of your own are simulated; start nodes with them, and give these with --live --url")
    if args.live:
        try:
            show(run_live(args, console), args)
        except (Unreachable, NodeDied, StartTimeout, RestError, ValueError) as error:
            refuse(console, "ablate", error)
            return 1
        return 0
    names = WITH_GOALS if args.name == GOALS else [args.name]
    if len(names) > 1 and (args.json or args.plot):
        made.error("`goals` runs several ablations: use --json and --plot with one of them, or scripts/reproduce.py")
    goals = []
    try:
        own_policies.check(args)
        for outcome in run_all([chosen(name, args) for name in names], args, console):
            goals += reached(outcome)
            show(outcome, args)
    except (OSError, ValueError) as error:
        refuse(console, "ablate", error)
        return 2
    if args.name == GOALS:
        print(goal_table(goals))
    return 0

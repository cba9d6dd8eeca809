"""The highest load at which a cluster, simulated or live, keeps its objectives, by bisection.

  scripts/tools.py capacity                                          # the conversation trace, P90 TTFT 30 s, TBT 0.1 s
  scripts/tools.py capacity --ttft-s 10 --tbt-s 0.2 --prefill 10 --decode 6 --pool-blocks 6000
  scripts/tools.py capacity --placement least-load,mooncake --json capacity.json
  scripts/tools.py capacity --live --nodes prefill=1,decode=1 --ttft-s 1 --tbt-s 0.05 --seconds 30
  scripts/tools.py capacity --live --url http://127.0.0.1:8000 --ttft-s 1 --tbt-s 0.05

A load is good if the percentile (--percentile, default 90) of TTFT and of the requests' mean time between tokens are
within the objectives and no request is refused. In the simulator the load is a replay speed; the command takes the
flags of scripts/simulate.py and searches several placements one after the other. With --live the load is requests per
second: Poisson arrivals, lognormal lengths (--prompt, --answer, --shared), another seed for every try. They go to nodes
of the embedded model that this command starts, one core each (flags for them after --), or to a running cluster
(--url).
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.config.flags import UsageError
from lab.ablations.live.loads import Shape
from lab.ablations.live.play import doors, pinned, warmed
from lab.ablations.live.search import Objectives, try_rate
from lab.bench.common.client import Unreachable
from lab.bench.common.results import write_result
from lab.flag_types import above_zero, part, percent, share
from lab.formulas.bisect import Tried, largest
from lab.launch.cluster import NodeDied, StartTimeout
from lab.loads.trace import TraceRow
from lab.one_line import refuse
from lab.planning.command import pair
from lab.simulator import command as simulate
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.result import percentile

HIGHEST = {"metric": "highest load", "unit": "requests/s"}


def parser() -> ArgumentParser:
    made = simulate.parser()
    made.description = __doc__
    made.add_argument("--ttft-s", type=above_zero, default=30.0, help="objective for the first token (default: 30)")
    made.add_argument("--tbt-s", type=above_zero, default=0.1, help="objective between tokens (default: 0.1)")
    made.add_argument("--percentile", type=percent, default=90.0, help="percentile of the requests (default: 90)")
    made.add_argument("--tolerance", type=part, help="relative error of the result (default: 0.02; --live: 0.1)")
    live = made.add_argument_group("--live")
    live.add_argument("--live", action="store_true", help="real nodes instead of the simulator")
    live.add_argument("--nodes", default="prefill=1,decode=1", help="nodes to start (default %(default)s)")
    live.add_argument("--url", action="append", default=[], help="a door of a running cluster; repeatable")
    live.add_argument(
        "--seconds", type=above_zero, default=30.0, help="seconds of requests per try (default %(default)s)"
    )
    live.add_argument("--begin", type=above_zero, default=1.0, help="the first rate, requests/s (default %(default)s)")
    live.add_argument("--prompt", type=pair, default=(500.0, 0.8), metavar="MEAN,CV", help="lognormal prompts, tokens")
    live.add_argument("--answer", type=pair, default=(32.0, 0.5), metavar="MEAN,CV", help="and answers")
    live.add_argument("--shared", type=share, default=0.0, help="share of requests that begin with one of 8 prefixes")
    live.add_argument("node_flags", nargs="*", metavar="-- FLAG", help="flags of every node, after --")
    return made


def try_speed(config: SimConfig, rows: Sequence[TraceRow], args: Namespace, speed: float) -> Tried:
    cluster = Cluster(config).played(replace(row, timestamp_ms=row.timestamp_ms / speed) for row in rows)
    ttft = percentile([job.ttft for job in cluster.jobs], args.percentile / 100)
    tbt = percentile([job.tbt for job in cluster.jobs if not job.refused], args.percentile / 100)
    refused = sum(bool(job.refused) for job in cluster.jobs) + cluster.unfinished  # neither has times that count
    values = {"ttft_s": ttft, "tbt_s": tbt, "refused": float(refused)}
    late = ttft > args.ttft_s or tbt > args.tbt_s
    return Tried(speed, not late and not refused, values)


def search(args: Namespace, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Searches in the simulator; returns (configuration, rows) of the result. Raises OSError, ValueError."""
    base = SimConfig(**{field.name: getattr(args, field.name) for field in fields(SimConfig)})
    name, rows = simulate.requests(args)
    seconds = (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000
    if not seconds:
        raise ValueError(f"{name}: a load needs --requests 2 or more, at different times")
    found = []
    for placement in args.placement.split(","):
        config = replace(base, placement=placement)

        def tell(speed: float, config: SimConfig = config) -> Tried:
            return told(console, config.placement, "speed", try_speed(config, rows, args, speed))

        every = largest(tell, 1.0, args.tolerance)
        best = max((one for one in every if one.good), key=lambda one: one.load)
        rate = best.load * len(rows) / seconds
        print(f"{placement}: {best.load:.3f} times the speed of {name}, {rate:.2f} requests/s")
        found.append({"case": placement, **HIGHEST, "ours": rate, **asdict(best), "tried": [asdict(t) for t in every]})
    return {"trace": name, "requests": len(rows), **base.as_dict()}, found


def search_live(args: Namespace, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(configuration, rows) of the result. Raises OSError, ValueError, Unreachable, NodeDied, StartTimeout."""
    with tempfile.TemporaryDirectory(prefix="capacity-") as folder, ExitStack() as stack:
        urls, case = args.url, " and ".join(args.url)
        if not urls:
            case = " ".join([args.nodes, *args.node_flags])
            urls = doors(stack.enter_context(pinned(args.nodes, args.node_flags, Path(folder) / "nodes")))
        wanted = Objectives(args.ttft_s, args.tbt_s, args.percentile / 100)
        shape, seeds = Shape(args.prompt, args.answer, args.shared), count(args.seed)
        config = warmed(urls)

        def tell(rate: float) -> Tried:
            return told(console, case, "requests/s", try_rate(urls, shape, rate, args.seconds, next(seeds), wanted))

        every = largest(tell, args.begin, args.tolerance)
    best = max((one for one in every if one.good), key=lambda one: one.load)
    print(f"{case}: {best.load:.2f} requests/s")
    row = {"case": case, **HIGHEST, "ours": best.load, **asdict(best), "tried": [asdict(one) for one in every]}
    return {"live": True, "shape": asdict(shape), "seconds": args.seconds, "seed": args.seed, "node": config}, [row]


def told(console: Console, case: str, unit: str, tried: Tried) -> Tried:
    """Prints a try and returns it."""
    ttft, tbt, refused = (tried.values[name] for name in ("ttft_s", "tbt_s", "refused"))
    verdict = "" if tried.good else f", {refused:.0f} refused: too much" if refused else ", too much"
    console.print(
        f"{case} at {tried.load:.3f} {unit}: TTFT {ttft:.2f} s, between tokens {1000 * tbt:.1f} ms{verdict}",
        markup=False,
    )
    return tried


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    args.tolerance = args.tolerance or (0.1 if args.live else 0.02)
    try:
        if (args.url or args.node_flags) and not args.live:
            raise ValueError("--url and flags of nodes need --live")
        config, found = (search_live if args.live else search)(args, console)
    except (OSError, ValueError, Unreachable, NodeDied, StartTimeout, UsageError) as error:
        refuse(console, "capacity", error)
        return 2
    if args.json:
        flags = {key: getattr(args, key) for key in ("ttft_s", "tbt_s", "percentile", "tolerance")}
        write_result({**config, **flags}, found, args.json)
    return 0

"""A trace through a simulated cluster: the classes of sched/ and cache/ that nodes run, under virtual time.

  scripts/simulate.py                                       # the conversation trace on 8 prefill and 8 decode nodes
  scripts/simulate.py --prefill 10 --decode 6 --speed 2     # another split, the trace replayed twice as fast
  scripts/simulate.py --placement random,least-load,mooncake,mooncake-central-greedy --gossip-s 1
  scripts/simulate.py --model embedded-cpu --mixed 2 --trace mine.jsonl --jobs jobs.jsonl
  scripts/simulate.py --prefill 4 --decode 4 --autoscale prefill=2..12,decode=2..12   # nodes start and leave
  scripts/simulate.py --placement mooncake,mooncake-cost --node-classes prefill:4:0.5:0.3,decode:4:0.5:0.3

Several placements run one after the other on the same requests and are printed side by side. The same seed gives the
same bytes. --placement, --eviction, --cache-admission, --queue-order, --batching-policy and --rejection also take your
own class as FILE.py:NAME, as nodes do (docs/hacking.md). --trace takes a file in Mooncake's format; the default is the
released conversation trace if ../shared/traces has it, else a generated one.
"""

from __future__ import annotations

import math
import re
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from inspect import getsource
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.bench.common.results import numbers, write_result
from lab.flag_types import above_zero, file_to_write, not_negative, positive
from lab.loads.generators import GENERATORS
from lab.loads.trace import TraceRow, jittered, read_trace
from lab.loads.traces import find_trace
from lab.one_line import TerseParser, progress, refuse
from lab.simulator import lengths
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.links import KINDS
from lab.simulator.making import POOL_MODELS
from lab.simulator.models.by_formula import HARDWARE
from lab.simulator.models.costs import KINDS as COST_KINDS
from lab.simulator.models.gossip import KINDS as GOSSIP_MODELS
from lab.simulator.predictors import predictors
from lab.simulator.result import figures
from sched.role_ratio import role_policies

CHOICES = {
    "hardware": tuple(HARDWARE),
    "kv_overlap": ("layer", "none"),
    "flow_order": ("fair", "deadline"),
    "publish": ("none", "home"),
    "predictor": tuple(predictors),
    "links": KINDS,
    "step_models": COST_KINDS,
    "output_lengths": lengths.KINDS,
    "pool_model": POOL_MODELS,
    "gossip_model": GOSSIP_MODELS,
    "migration": ("none", "balance"),
    "role_policy": tuple(role_policies),
}
OWN = {"placement"}  # takes several values

COMMENT = re.compile(r"^ +(\w+): .+?  # (.+)$", re.MULTILINE)
"""A field of lab/simulator/config.py and its comment."""


def parser() -> ArgumentParser:
    """A flag for every field of SimConfig, and flags for the requests and the output."""
    made = TerseParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--trace", metavar="FILE", help="requests in Mooncake's format, .jsonl or .jsonl.xz")
    made.add_argument("--generate", choices=tuple(GENERATORS), help="generated requests instead of a trace, by --seed")
    made.add_argument("--requests", type=positive, metavar="N", help="only the first N requests")
    made.add_argument("--speed", type=above_zero, default=1.0, help="replay speed: 2 = half the time between requests")
    made.add_argument(
        "--jitter-s", type=not_negative, default=3.0, help="spread over which a trace's equal timestamps are moved, s"
    )
    made.add_argument(
        "--jobs", type=file_to_write, metavar="FILE", help="write the result of every request, one JSON line each"
    )
    made.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="write the figures and the whole configuration"
    )
    made.add_argument("--placement", default="mooncake", help="policies, joined by commas (default: mooncake)")
    meaning = dict(COMMENT.findall(getsource(SimConfig)))
    for field in fields(SimConfig):
        if field.name not in OWN:
            kind = type(field.default)
            help_text = f"{meaning.get(field.name, 'see lab/simulator/config.py')} (default: {field.default})"
            flag = "--" + field.name.replace("_", "-")
            if kind is bool:
                made.add_argument(flag, action=BooleanOptionalAction, default=field.default, help=help_text)
                continue
            made.add_argument(flag, type=kind, default=field.default, choices=CHOICES.get(field.name), help=help_text)
    return made


def requests(args: Namespace) -> tuple[str, list[TraceRow]]:
    """(name of the trace, its rows by time). Raises ValueError."""
    path = Path(args.trace) if args.trace else find_trace("conversation")
    if args.generate or path is None:
        kind = args.generate or "conversation"
        name, rows = f"generated {kind}", GENERATORS[kind](args.seed, args.requests or 4000)
    else:
        try:
            name, rows = path.name, list(read_trace(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"--trace {path}: {error}") from None
        if not rows:
            raise ValueError(f"--trace {path}: it has no request")
    rows = jittered(rows[: args.requests], args.jitter_s, args.seed) if path and not args.generate else rows
    return name, [replace(row, timestamp_ms=row.timestamp_ms / args.speed) for row in rows]


def run(config: SimConfig, rows: Sequence[TraceRow], bar: Progress) -> tuple[Cluster, float]:
    """(the cluster after the run, wall seconds)"""
    cluster = Cluster(config)
    begun = time.monotonic()
    task = bar.add_task(config.placement, total=len(rows))
    for done in cluster.run(rows):
        bar.update(task, completed=done)
    bar.update(task, completed=len(rows))
    return cluster, time.monotonic() - begun


def side_by_side(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="figures of each placement")
    shown.add_column("")
    for name in results:
        shown.add_column(name, justify="right")
    for label, pick in SHOWN.items():
        shown.add_row(label, *(pick(result) for result in results.values()))
    return shown


def _at(name: str, part: str, unit: float = 1.0) -> Any:
    return lambda result: "-" if result[name] is None else f"{unit * result[name][part]:.4g}"


SHOWN = {
    "TTFT mean, s": _at("ttft_s", "mean"),
    "TTFT p90, s": _at("ttft_s", "p90"),
    "TTFT p99, s": _at("ttft_s", "p99"),
    "TBT p90, ms": _at("tbt_s", "p90", 1000),
    "longest gap p99, ms": _at("longest_gap_s", "p99", 1000),
    "slowdown mean": _at("slowdown", "mean"),
    "goodput, share": lambda result: f"{result['goodput']:.4f}",
    "node-hours": lambda result: f"{result['node_hours']:.4g}",
    "cost per million good tokens": lambda result: f"{result['cost_per_million_tokens'] or math.nan:.4g}",
    "busy cost per million good tokens": lambda result: f"{result['busy_cost_per_million_tokens'] or math.nan:.4g}",
    "starts and drains": lambda result: str(result["scale_changes"]),
    "refused": lambda result: str(result["refused"]),
    "tokens not computed": lambda result: f"{result['token_hit_rate']:.4f}",
    "moved, GB": lambda result: f"{result['bytes_moved'] / 1e9:.0f}",
    "simulated requests per s": lambda result: f"{result['simulated_requests_s']:.0f}",
}


def write_jobs(path: Path, cluster: Cluster) -> None:
    """One JSON object per request; null = it did not reach that point."""
    with path.open("wb") as file:
        for job in cluster.jobs:
            row = {name: value for name, value in asdict(job).items() if name not in ("blocks", "log", "gaps")}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        base = SimConfig(**{field.name: getattr(args, field.name) for field in fields(SimConfig)})
        name, rows = requests(args)
        results: dict[str, dict[str, Any]] = {}
        with progress(console) as bar:
            for placement in args.placement.split(","):
                cluster, seconds = run(replace(base, placement=placement), rows, bar)
                results[placement] = figures(cluster) | {"simulated_requests_s": len(rows) / seconds}
                if args.jobs:
                    write_jobs(args.jobs.with_stem(f"{args.jobs.stem}-{placement}"), cluster)
    except (OSError, ValueError) as error:
        refuse(console, "scripts/simulate.py", error)
        return 2
    Console().print(side_by_side(results))
    if args.json:
        for result in results.values():
            del result["simulated_requests_s"]  # depends on this machine; the file describes only the run
        out = [row for placement, result in results.items() for row in numbers(placement, result)]
        write_result({"trace": name, "requests": len(rows), "speed": args.speed, **base.as_dict()}, out, args.json)
    return 0

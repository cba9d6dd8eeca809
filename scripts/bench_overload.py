#!/usr/bin/env python3
"""Twice what the cluster can take, under each rejection variant: goodput, refusals, wasted prefill.

    python scripts/bench_overload.py                       8 prefill + 8 decode nodes, 4,000 requests, a few seconds
    python scripts/bench_overload.py --load 1.2 --requests 20000 --json out.json
    python scripts/bench_overload.py --live                1 prefill + 1 decode node of the embedded model, 3 minutes

Without --live the cluster is simulated in virtual time; who is placed where and who is refused is decided by the
classes that the nodes use (sched/placements/, sched/rejection.py), with the loads of all nodes known at every arrival.
Goodput counts requests that kept both objectives of their class. papers.md section 6 has the paper's table: refused
requests only. --live sends requests of the class standard to real nodes, its objectives times --slo-scale.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sched.rejection import rejections
from scripts.benchlib.client import Unreachable
from scripts.benchlib.results import Row, add_result_flags, report
from scripts.cluster import NodeDied, StartTimeout
from scripts.overloadbench import live
from scripts.overloadbench.driver import Cluster, arrivals, capacity
from scripts.overloadbench.machines import Speed

PAPER_REFUSED = {"stage-load": 4183, "early": 3771, "predicted": 3589}
"""v3 table 3: of about 23,000 requests at twice the replay speed, 8P + 8D."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=2.0, help="offered load over capacity")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--prefill", type=int, default=8, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=8, help="decode nodes")
    parser.add_argument("--seed", type=int, default=1)
    real = parser.add_argument_group("--live")
    real.add_argument("--live", action="store_true", help="real nodes in place of the simulated cluster")
    real.add_argument("--seconds", type=float, default=20.0, help="of requests per variant (default %(default)s)")
    real.add_argument("--slo-scale", type=float, default=0.6, help="of the nodes (default %(default)s: 3 s and 60 ms)")
    real.add_argument("--capacity", type=float, help="requests/s, as measured before")
    real.add_argument("--variants", default=",".join(rejections), help="which, joined by commas (default: all)")
    real.add_argument("--add", type=Path, nargs="+", default=[], metavar="PATH", help="result files to add to")
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.live:
        return overload_nodes(args)
    if args.quick:
        args.requests = min(args.requests, 500)
    speed = Speed()
    most = capacity(speed, args.prefill, args.decode, arrivals(5000, 1.0, args.seed))
    offered = arrivals(args.requests, args.load * most, args.seed)
    print(f"seed {args.seed}: capacity {most:.2f} requests/s, offered {args.load * most:.2f}")
    rows: list[Row] = []
    for variant in rejections:
        result = Cluster(variant, args.prefill, args.decode, speed, args.seed).run(list(offered))
        span = offered[-1].at
        refused = result.counts["refused at arrival"] + result.counts["refused after prefill"]
        case = f"--rejection {variant}"
        paper = {"paper": PAPER_REFUSED[variant] / 23_000} if variant in PAPER_REFUSED else {}
        rows += [
            Row(case, "goodput", "1/s", result.good / span, limits={"capacity": most}),
            Row(case, "refused", "share", refused / result.offered, dict(paper)),
            Row(case, "refused after prefill", "share", result.counts["refused after prefill"] / result.offered),
            Row(case, "late to the first token", "share", result.counts["late to the first token"] / result.offered),
            Row(case, "slow to decode", "share", result.counts["slow"] / result.offered),
            Row(case, "prefill wasted on refused", "share", result.wasted_tokens / max(1, result.prefill_tokens)),
            Row(case, "prefill spent on late", "share", result.late_tokens / max(1, result.prefill_tokens)),
        ]
    config = {name: getattr(args, name) for name in ("load", "requests", "prefill", "decode", "seed")}
    report(config | {"capacity_per_s": most}, rows, args.json)
    return 0


def overload_nodes(args: argparse.Namespace) -> int:
    variants = args.variants.split(",")
    if unknown := set(variants) - set(rejections):
        known = ", ".join(rejections)
        print(f"bench_overload: --variants {', '.join(sorted(unknown))}: choose from {known}", file=sys.stderr)
        return 2
    if args.quick:
        args.seconds = min(args.seconds, 5.0)
    rows = [Row(**row) for path in args.add for row in json.loads(path.read_text())["rows"]]
    try:
        with tempfile.TemporaryDirectory(prefix="overload-") as folder:
            config, found = live.measure(args, variants, Path(folder))
    except (OSError, ValueError, Unreachable, NodeDied, StartTimeout) as error:
        print(f"bench_overload: {error}", file=sys.stderr)
        return 2
    config |= {"live": True, "load": args.load, "slo_scale": args.slo_scale, "seed": args.seed}
    report(config, rows + found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

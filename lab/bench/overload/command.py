"""Twice the load that the cluster can serve, under each rejection variant: goodput, refusals, wasted prefill.

    python scripts/bench.py overload                       simulated: the ablation `overload` of scripts/ablate.py
    python scripts/bench.py overload --live                1 prefill + 1 decode node of the embedded model, 3 minutes
    python scripts/bench.py overload --live --load 1.2 --json out.json

Goodput counts requests that meet both objectives of their class. --live sends requests of the class standard to real
nodes, with its objectives multiplied by --slo-scale.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.ablations import command as ablate
from lab.bench.common.client import Unreachable
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.overload import live
from lab.launch.cluster import NodeDied, StartTimeout
from sched.rejection import rejections

QUICK = ["--requests", "500", "--seeds", "1"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = parser.add_argument_group("--live")
    real.add_argument("--live", action="store_true", help="real nodes instead of the simulated cluster")
    real.add_argument("--load", type=float, default=2.0, help="offered load over capacity (default %(default)s)")
    real.add_argument("--seed", type=int, default=1)
    real.add_argument("--seconds", type=float, default=20.0, help="seconds per variant (default %(default)s)")
    real.add_argument("--slo-scale", type=float, default=0.6, help="as of a node (default %(default)s: 3 s and 60 ms)")
    real.add_argument("--capacity", type=float, help="requests/s, from an earlier measurement")
    real.add_argument("--variants", default=",".join(rejections), help="variants, joined by commas (default: all)")
    real.add_argument("--add", type=Path, nargs="+", default=[], metavar="PATH", help="result files to add to")
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if not args.live:
        written = ["--json", str(args.json)] if args.json else []
        return ablate.main(["overload", *(QUICK if args.quick else []), *written])
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

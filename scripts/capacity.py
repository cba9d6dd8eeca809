#!/usr/bin/env python3
"""The highest replay speed at which a simulated cluster keeps its objectives, by bisection.

  scripts/capacity.py                                          # the conversation trace, P90 TTFT 30 s, P90 TBT 0.1 s
  scripts/capacity.py --ttft-s 10 --tbt-s 0.2 --prefill 10 --decode 6 --pool-blocks 6000
  scripts/capacity.py --placement least-load,mooncake --json capacity.json

A speed is good when the percentile (--percentile, default 90) of TTFT and of the requests' mean time between tokens are
within the objectives and nothing is refused. Takes the flags of scripts/simulate.py; several placements are searched
one after the other.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without installing

from rich.console import Console

from scripts import simulate
from scripts.benchlib.results import write_result
from scripts.lab.bisect import Tried, largest
from sim.cluster import Cluster
from sim.config import SimConfig
from sim.result import percentile
from sim.trace import TraceRow


def parser() -> ArgumentParser:
    made = simulate.parser()
    made.description = __doc__
    made.add_argument("--ttft-s", type=float, default=30.0, help="objective for the first token (default: 30)")
    made.add_argument("--tbt-s", type=float, default=0.1, help="objective between tokens (default: 0.1)")
    made.add_argument("--percentile", type=float, default=90.0, help="of the requests (default: 90)")
    made.add_argument("--tolerance", type=float, default=0.02, help="the answer's, as a share (default: 0.02)")
    return made


def try_speed(config: SimConfig, rows: Sequence[TraceRow], args: Namespace, speed: float) -> Tried:
    cluster = Cluster(config)
    for _ in cluster.run([replace(row, timestamp_ms=row.timestamp_ms / speed) for row in rows]):
        pass
    ttft = percentile([job.ttft for job in cluster.jobs], args.percentile / 100)
    tbt = percentile([job.tbt for job in cluster.jobs if not job.refused], args.percentile / 100)
    refused = sum(bool(job.refused) for job in cluster.jobs)
    values = {"ttft_s": ttft, "tbt_s": tbt, "refused": float(refused)}
    late = ttft > args.ttft_s or tbt > args.tbt_s
    return Tried(speed, not late and not refused, values)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    base = SimConfig(**{field.name: getattr(args, field.name) for field in fields(SimConfig)})
    console = Console(stderr=True)
    found = []
    try:
        if not 0 < args.percentile < 100:
            raise ValueError(f"--percentile must be between 0 and 100, got {args.percentile}")
        name, rows = simulate.requests(args)
        seconds = (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000

        for placement in args.placement.split(","):
            config = replace(base, placement=placement)

            def tell(speed: float, config: SimConfig = config) -> Tried:
                tried = try_speed(config, rows, args, speed)
                console.print(
                    f"{config.placement} at {speed:.3f}: TTFT {tried.values['ttft_s']:.2f} s, between tokens "
                    f"{1000 * tried.values['tbt_s']:.1f} ms{'' if tried.good else ', too much'}"
                )
                return tried

            every = largest(tell, 1.0, args.tolerance)
            best = max((one for one in every if one.good), key=lambda one: one.load)
            rate = best.load * len(rows) / seconds
            print(f"{placement}: {best.load:.3f} times the speed of {name}, {rate:.2f} requests/s")
            found.append({"case": placement, "requests_s": rate, **asdict(best), "tried": [asdict(t) for t in every]})
    except (OSError, ValueError) as error:
        console.print(f"capacity: {error}", style="red")
        return 2
    if args.json:
        flags = {key: getattr(args, key) for key in ("ttft_s", "tbt_s", "percentile", "tolerance")}
        write_result({"trace": name, "requests": len(rows), **flags, **base.as_dict()}, found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulator at scale: seconds, peak memory and events of a run on one core, for clusters of several sizes.

    python scripts/bench.py simulator --json lab/results/DATE-simulator.json     10,000 nodes, six minutes, 5 GB
    python scripts/bench.py simulator --nodes 100 1000

The run is the one of

    scripts/simulate.py --generate conversation --requests 200000 --speed 625 --prefill 5000 --decode 5000
                        --cell-nodes 256

for 10,000 nodes: half of them prefill, and each node gets as many requests, as fast, in every size. The goal is 15
minutes on one core per 1,000 nodes. A run has one core, so its seconds stand next to 15 minutes, and its CPU time next
to 15 minutes of all those cores. Every size runs in a process of its own, because the peak is that of a process.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lab.bench.common.results import Row, add_result_flags, report
from lab.flag_types import natural, positive
from lab.loads.generators import GENERATORS
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.result import figures

TRACE, REQUESTS_PER_NODE, NODES_PER_SPEED = "conversation", 20, 16
CELL_NODES = 256
GOAL_S, GOAL_NODES = 900.0, 1000
QUICK_NODES = 200


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation in a process of its own."""

    seconds: float
    cpu_s: float
    peak_bytes: int  # of the whole process, Python and the requests included
    events: int
    simulated_s: float
    requests: int
    finished: int
    goodput: float


def config(nodes: int, seed: int) -> SimConfig:
    """Half of the nodes prefill, the others decode. Raises ValueError for fewer than two."""
    if nodes < 2:
        raise ValueError(f"--nodes {nodes}: a prefill node and a decode node are needed")
    return SimConfig(prefill=nodes // 2, decode=nodes - nodes // 2, cell_nodes=CELL_NODES, seed=seed)


def measure(nodes: int, seed: int) -> Run:
    """To be called in a new process. Time and CPU are of the simulation; making the requests is not in them."""
    wanted = config(nodes, seed)
    rows = GENERATORS[TRACE](seed, REQUESTS_PER_NODE * nodes)
    rows = [replace(row, timestamp_ms=row.timestamp_ms * NODES_PER_SPEED / nodes) for row in rows]
    begun, cpu = time.monotonic(), time.process_time()
    cluster = Cluster(wanted).played(rows)
    seconds, cpu_s = time.monotonic() - begun, time.process_time() - cpu
    found = figures(cluster)
    return Run(
        seconds=seconds,
        cpu_s=cpu_s,
        peak_bytes=peak_bytes(),
        events=cluster.loop.events,
        simulated_s=cluster.loop.now,
        requests=int(found["requests"]),
        finished=int(found["finished"]),
        goodput=float(found["goodput"]),
    )


def peak_bytes() -> int:
    """The most memory that this process has had at once. Not ru_maxrss: that also counts its parent before exec."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/self/status has no VmHWM")
    return 1024 * int(found[1])


def rows_of(nodes: int, run: Run) -> list[Row]:
    case = f"{nodes:,} nodes"
    cores = max(1.0, nodes / GOAL_NODES)
    note = f"{case}: the goal of CPU time is that of {cores:g} cores for {GOAL_S:g} s; the run has one core"
    return [
        Row(case, "time", "s", run.seconds, limits={"goal": GOAL_S}, note=note),
        Row(case, "CPU time", "s", run.cpu_s, limits={"goal": GOAL_S * cores}),
        Row(case, "peak memory", "GB", run.peak_bytes / 1e9),
        Row(case, "events", "", run.events),
        Row(case, "events per second", "1/s", run.events / run.seconds),
        Row(case, "simulated time", "s", run.simulated_s),
        Row(case, "requests", "", run.requests),
        Row(case, "finished", "", run.finished),
        Row(case, "goodput, share", "", run.goodput),
    ]


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="bench.py simulator", description=(__doc__ or "").splitlines()[0])
    add_result_flags(parser)
    parser.add_argument("--nodes", type=positive, nargs="+", default=[10_000], help="sizes (default: 10000)")
    parser.add_argument("--seed", type=natural, default=0)
    args = parser.parse_args(argv)
    if args.quick:
        args.nodes = sorted({min(nodes, QUICK_NODES) for nodes in args.nodes})
    for nodes in args.nodes:
        try:
            config(nodes, args.seed)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    rows: list[Row] = []
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=new, max_tasks_per_child=1) as pool:
        for nodes in args.nodes:
            print(f"{nodes} nodes: {REQUESTS_PER_NODE * nodes} requests", file=sys.stderr)
            rows += rows_of(nodes, pool.submit(measure, nodes, args.seed).result())
    told = {"trace": f"generated {TRACE}", "requests_per_node": REQUESTS_PER_NODE, "cell_nodes": CELL_NODES}
    report(told | {"nodes": args.nodes, "seed": args.seed, "quick": args.quick}, rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

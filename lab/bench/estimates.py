"""How far the estimates of placements are from the measured times, on real nodes under load.

  scripts/bench.py estimates
  scripts/bench.py estimates --layouts pair --busy 2 --json out.json

Layouts: `mixed` is one node with all cores, `pair` is 1 prefill + 1 decode node, each on its own core. An open loop of
--rate requests/s, with prompts of --input-len and answers of --output-len tokens (each from half to one and a half of
it), runs for two windows of --seconds. The benchmark then asks for the timelines of the requests that ended in each
window (GET /live/requests/ID), as `mooncake.py explain` does: its table of estimates and measured times is the source.
A share is |estimated - measured| / measured; estimates and measured times that are both below 1 ms have none.

--busy N starts N processes that only compute, so that the nodes have to share the cores.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from engine.observe.estimate_errors import EstimateErrors
from lab.bench.common.client import Client, greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import TokenSource, random_specs, with_arrivals
from lab.flag_types import above_zero, natural, positive
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import pin

GOAL_PERCENT = 25.0
NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")
LAYOUTS = {"mixed": "mixed=1", "pair": "prefill=1,decode=1"}
WINDOWS = ("first window", "second window")
SPREAD = 0.5
SPIN = "while True: pass"


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS), help="default: all")
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="seconds of each window (default %(default)s)")
    parser.add_argument(
        "--rate", type=above_zero, default=2.0, help="requests/s of the open loop (default %(default)s)"
    )
    parser.add_argument(
        "--input-len", type=positive, default=384, help="mean tokens of its prompts (default %(default)s)"
    )
    parser.add_argument(
        "--output-len", type=positive, default=32, help="mean tokens of its answers (default %(default)s)"
    )
    parser.add_argument("--busy", type=natural, default=0, help="processes that only compute (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of prompts and arrivals (default %(default)s)")
    parser.add_argument("--node-flags", default="", help="more flags for every node, in one string")
    return quicken(parser.parse_args(argv), seconds=10.0)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """`count` processes that compute, each on any core."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        found: dict[str, Any] = await response.json()
        return found


async def ended(session: aiohttp.ClientSession, urls: Iterable[str], known: set[str]) -> list[dict[str, Any]]:
    """The timelines of requests that ended since the last call; `known`: the ids of earlier ones, extended here."""
    timelines = []
    for url in urls:
        live = await _json(session, url + "/live")
        own = next(node for node in live["nodes"] if node["node_id"] == live["node_id"])
        for request in own["recent"]["requests"]:
            if request["id"] not in known:
                known.add(request["id"])
                timelines.append(await _json(session, f"{url}/live/requests/{request['id']}"))
    return timelines


def rows_of(case: str, timelines: Sequence[dict[str, Any]]) -> list[Row]:
    """Per estimate: the mean share of the error, the mean absolute error, and the means of both times."""
    errors = EstimateErrors(len(timelines) or 1)
    for timeline in timelines:
        errors.add(0.0, timeline["truth"])
    rows = []
    for name, one in errors.at(0.0).items():
        pairs = [timeline["truth"][name] for timeline in timelines if name in timeline["truth"]]
        for which in ("estimated_s", "measured_s"):
            mean_ms = 1000 * sum(pair[which] for pair in pairs) / len(pairs)
            rows.append(Row(case, f"{name} mean {which.removesuffix('_s')}", "ms", mean_ms))
        rows.append(Row(case, f"{name} mean difference", "ms", 1000 * one["error_s"]))
        if one["mape"] is not None:
            note = f"{case} {name}: {one['shares']} of {one['requests']} requests have a share"
            rows.append(Row(case, f"{name} MAPE", "%", 100 * one["mape"], limits={"goal": GOAL_PERCENT}, note=note))
    return rows


async def measure(args: Namespace, layout: str, run_dir: Path) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    async with (
        LocalCluster(LAYOUTS[layout], (*NODE_FLAGS, *args.node_flags.split()), run_dir=run_dir) as cluster,
        open_session() as session,
    ):
        if len(cluster.nodes) > 1:
            for index, node in enumerate(cluster.nodes):
                pin(node.pid, index)
        urls = [node.url for node in cluster.nodes]
        client: Client = await greedy_client(session, layout, urls[0])
        source, known = TokenSource(args.seed, 32_000), set[str]()
        for number, window in enumerate(WINDOWS):
            count = max(1, round(args.rate * args.seconds))
            seed = args.seed + number
            specs = random_specs(source, seed, 2 * count, args.input_len, args.output_len, 0, SPREAD)
            specs = specs[number * count :][:count]  # prompts are made of their index: no window repeats another
            outcomes, _ = await client.run(with_arrivals(specs, seed, args.rate, 1.0), None, 600.0, lambda: None)
            failed = sum(outcome.error is not None for outcome in outcomes)
            case = f"{layout} {window}"
            rows.append(Row(case, "failed", "requests", failed))
            rows += rows_of(case, await ended(session, urls, known))
    return rows, client.server.config or {}


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    rows: list[Row] = []
    configs: dict[str, Any] = {}
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="estimates-")))
        stack.enter_context(spinning(args.busy))
        for layout in args.layouts:
            (run_dir / layout).mkdir()
            found, configs[layout] = asyncio.run(measure(args, layout, run_dir / layout))
            rows += found
    shown = {name: value for name, value in vars(args).items() if name != "json"}
    report({"benchmark": "estimates", **shown, "servers": configs}, rows, args.json)
    return 0

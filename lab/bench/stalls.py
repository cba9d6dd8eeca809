"""How long events wait for the event loop of a serving node, and why.

  scripts/bench.py stalls
  scripts/bench.py stalls --quick --layouts mixed --json out.json

Real node processes and streaming clients. Layouts: `mixed` is one node whose engine uses every core, `spare` leaves one
core for the loop and the client, `pair` is 1 prefill + 1 decode node, each on its own core. Loads: `open` is an open
loop of --rate requests/s (--input-len in, --output-len out), `long` four running streams while prompts of 4,000 tokens
arrive. The benchmark reads the nodes' own samples (net/loop/stalls.py, 50 per second, GET /metrics) from the start to
the end of each load. It shows percentiles, interpolated in the histogram, and the time of waits over 2 ms by cause: a
handler that computes, another thread on the core, another thread with the interpreter lock.

It also shows the CPU use of the node, and of all processes except the nodes and this client. If other processes are
busy, they cause a part of the waits for a core.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from lab.ablations.live.shares import Watch
from lab.bench.common.client import Client, Outcome, greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.common.workload import SUFFIX, WARMUP, Spec, TokenSource, with_arrivals
from lab.flag_types import above_zero, natural, positive
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import pin

GOAL_MS = 2.0
NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mixed": ("mixed=1", ()),
    "spare": ("mixed=1", ("--num-threads", "1")),
    "pair": ("prefill=1,decode=1", ()),
}
LOADS = ("open", "long")
STREAMS, LONG_PROMPT = 4, 4000
CAUSES = ("computing", "core", "lock")


@dataclass(frozen=True, slots=True)
class Waits:
    """Samples of one node: counts by upper bound in seconds (the last is infinite), and seconds of the long ones."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    causes: dict[str, float]

    def since(self, before: Waits) -> Waits:
        counts = tuple(b - a for a, b in zip(before.counts, self.counts, strict=True))
        return Waits(self.bounds, counts, {c: self.causes[c] - before.causes[c] for c in self.causes})

    def percentile_ms(self, share: float) -> float:
        """Linear interpolation within a bucket; beyond the last bound, that bound."""
        wanted = share * sum(self.counts)
        below = 0.0
        for (low, high), count in zip(pairwise((0.0, *self.bounds)), self.counts, strict=True):
            if below + count >= wanted and count:
                return 1000 * (low if high == float("inf") else low + (high - low) * (wanted - below) / count)
            below += count
        return 0.0

    def share_over(self, seconds: float) -> float:
        """The share of waits above `seconds`, which must be a bound of the histogram."""
        over = sum(n for bound, n in zip(self.bounds, self.counts, strict=True) if bound > seconds)
        return over / max(1.0, sum(self.counts))


def waits_in(metrics: str) -> Waits:
    """Parses the text of GET /metrics."""
    upto: list[tuple[float, float]] = []
    causes = dict.fromkeys(CAUSES, 0.0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "mooncake:event_loop_stall_seconds_bucket":
                upto.append((float(sample.labels["le"]), sample.value))
            elif sample.name == "mooncake:event_loop_long_stall_seconds_total":
                causes[sample.labels["cause"]] = sample.value
    bounds, totals = zip(*sorted(upto), strict=True)
    return Waits(bounds, tuple(b - a for a, b in pairwise((0.0, *totals))), causes)


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS), help="default: all")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument("--seconds", type=above_zero, default=20.0, help="seconds of each load (default %(default)s)")
    parser.add_argument(
        "--rate", type=above_zero, default=4.0, help="requests/s of the open loop (default %(default)s)"
    )
    parser.add_argument("--input-len", type=positive, default=512, help="tokens of its prompts (default %(default)s)")
    parser.add_argument("--output-len", type=positive, default=64, help="tokens of its answers (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of prompts and arrivals (default %(default)s)")
    parser.add_argument("--node-flags", default="", help="more flags for every node, in one string")
    args = parser.parse_args(argv)
    if args.quick:
        args.seconds = min(args.seconds, 8.0)
    return args


async def open_loop(client: Client, args: Namespace, source: TokenSource) -> int:
    """Returns the number of failed requests; a busy cluster refuses some."""
    count = max(1, round(args.rate * args.seconds))
    specs = [Spec(source.tokens(args.input_len, SUFFIX, i), args.output_len) for i in range(count)]
    outcomes, _ = await client.run(with_arrivals(specs, args.seed, args.rate, 1.0), None, 600.0, lambda: None)
    return sum(outcome.error is not None for outcome in outcomes)


async def long_prompts(client: Client, args: Namespace, source: TokenSource) -> int:
    """Sends one long prompt after another while the streams run; returns the number of failed requests."""
    outcomes = [Outcome() for _ in range(STREAMS)]
    specs = [Spec(source.tokens(64, WARMUP, i), 4000) for i in range(STREAMS)]
    streams = [asyncio.create_task(client.send(*pair)) for pair in zip(specs, outcomes, strict=True)]
    try:
        end = asyncio.get_running_loop().time() + args.seconds
        number = failed = 0
        while asyncio.get_running_loop().time() < end:
            long = Outcome()
            await client.send(Spec(source.tokens(LONG_PROMPT, SUFFIX, 10_000 + number), 1), long)
            failed += long.error is not None
            number += 1
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return failed


async def read(session: aiohttp.ClientSession, url: str) -> Waits:
    async with session.get(url + "/metrics") as response:
        return waits_in(await response.text())


def rows_of(case: str, waits: Waits, cores: float, others: float) -> list[Row]:
    long_s = sum(waits.causes.values())
    note = f"{case}: {sum(waits.counts):.0f} samples"
    return [
        *(
            Row(case, f"wait {name}", "ms", waits.percentile_ms(share), limits={"goal": GOAL_MS}, note=note)
            for name, share in (("p50", 0.5), ("p99", 0.99))
        ),
        Row(case, "over 2 ms", "%", 100 * waits.share_over(GOAL_MS / 1000)),
        *(
            Row(case, f"of these: {cause}", "%", 100 * waits.causes[cause] / long_s if long_s else 0.0)
            for cause in CAUSES
        ),
        Row(case, "cores taken by the node", "cores", cores),
        Row(case, "cores taken by others", "cores", others),
    ]


async def measure(args: Namespace, layout: str, run_dir: Path) -> tuple[list[Row], dict[str, Any]]:
    nodes, more = LAYOUTS[layout]
    loads = {"open": open_loop, "long": long_prompts}
    rows: list[Row] = []
    async with (
        LocalCluster(nodes, (*NODE_FLAGS, *more, *args.node_flags.split()), run_dir=run_dir) as cluster,
        open_session() as session,
    ):
        if len(cluster.nodes) > 1:
            for index, node in enumerate(cluster.nodes):
                pin(node.pid, index)
        pids = {node.name: node.pid for node in cluster.nodes}
        client = await greedy_client(session, layout, cluster.nodes[-1].url)
        source = TokenSource(args.seed, 32_000)
        for i in range(4):  # first steps are slow
            await client.send(Spec(source.tokens(256, WARMUP, 100 + i), 16), Outcome())
        for load in args.loads:
            before, watch = [await read(session, node.url) for node in cluster.nodes], Watch(pids)
            failed = await loads[load](client, args, source)
            rows.append(Row(f"{layout} {load}", "failed", "requests", failed))
            cores = watch.end()
            for node, earlier in zip(cluster.nodes, before, strict=True):
                waits = (await read(session, node.url)).since(earlier)
                taken = cores.loops[node.name] + cores.others[node.name]
                rows += rows_of(f"{layout} {load} {node.name}", waits, taken, cores.elsewhere)
    return rows, client.server.config or {}


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    rows: list[Row] = []
    configs: dict[str, Any] = {}
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stalls-")))
        for layout in args.layouts:
            (run_dir / layout).mkdir()
            found, configs[layout] = asyncio.run(measure(args, layout, run_dir / layout))
            rows += found
    shown = {name: value for name, value in vars(args).items() if name != "json"}
    report({"benchmark": "stalls", **shown, "servers": configs}, rows, args.json)
    return 0

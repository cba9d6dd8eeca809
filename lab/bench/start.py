"""The time from start to first token, and the cost of splitting one node into processes.

  scripts/bench.py start
  scripts/bench.py start --rounds 5 --json out.json

A node of the embedded model is started --rounds times: from the start of its process to its ready line, and to the
first token of the first request. The first start converts weights and compiles kernels if necessary, so it is shown
separately; the others are warm, and have their bytecode even if PYTHONDONTWRITEBYTECODE is set. The same for
--tensor-parallel-size 3, which divides the model's heads (gloo on this host, at least one thread each: with fewer than
3 cores they wait for each other). Each node also reports the time to first token of a 512-token prompt and the time per
token of one stream.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from lab.bench.common.client import greedy_client
from lab.bench.common.latency import tpot_s
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.common.workload import SUFFIX, WARMUP, Spec, TokenSource
from lab.flag_types import positive
from lab.launch.cluster import LocalCluster, Processes

RANKS = (1, 3)
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Seconds."""

    ready_s: float
    first_token_s: float
    ttft_s: float  # of a long prompt after the start
    tpot_s: float  # of its answer


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--rounds", type=positive, default=4, help="starts of each node (default %(default)s)")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds = 2
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first start may be cold")
    return args


async def start(ranks: int, run_dir: Path, seed: int) -> tuple[Start, dict[str, Any]]:
    """Starts one node and sends requests to it. Raises Unreachable when a request fails."""
    begun = time.monotonic()
    node_flags = ("--kv-cache-bytes", "400M", "--tensor-parallel-size", str(ranks))
    processes = Processes({"PYTHONDONTWRITEBYTECODE": ""})
    made = LocalCluster("mixed=1", node_flags, run_dir=run_dir, processes=processes)
    async with made as cluster, aiohttp.ClientSession() as session:
        node = cluster.nodes[0]
        client = await greedy_client(session, "node", node.url)
        source = TokenSource(seed, 32_000)
        await client.ask(Spec(source.tokens(8, WARMUP, 0), 1))
        first_s = time.monotonic() - begun
        await client.ask(Spec(source.tokens(PROMPT_TOKENS, WARMUP, 1), 8))
        done = await client.ask(Spec(source.tokens(PROMPT_TOKENS, SUFFIX, 0), OUTPUT_TOKENS))
        assert node.ready_s is not None
        return Start(node.ready_s, first_s, done.ttft_s, tpot_s(done)), client.server.config or {}


def rows_of(starts: Mapping[int, Sequence[Start]]) -> list[Row]:
    """Medians of the warm starts; ratios refer to one process."""
    rows = []
    for ranks, all_of in starts.items():
        case, warm = f"{ranks} process{'es' if ranks > 1 else ''}", all_of[1:]
        note = f"{len(warm)} warm starts"
        rows.append(Row(case, "first token of the first start", "s", all_of[0].first_token_s))
        for metric, unit, factor, name in (
            ("ready", "s", 1, "ready_s"),
            ("first token", "s", 1, "first_token_s"),
            (f"TTFT of {PROMPT_TOKENS} tokens", "ms", 1000, "ttft_s"),
            ("TPOT of one stream", "ms", 1000, "tpot_s"),
        ):
            ours, alone = (factor * median(getattr(s, name) for s in group) for group in (warm, starts[1][1:]))
            rows.append(Row(case, metric, unit, ours, {"1 process": alone}, note=note))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    starts: dict[int, list[Start]] = {ranks: [] for ranks in RANKS}
    configs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for number in range(args.rounds):
            for ranks in RANKS:
                run_dir = Path(folder) / f"{ranks}-{number}"
                run_dir.mkdir()
                one, configs[str(ranks)] = asyncio.run(start(ranks, run_dir, number))
                starts[ranks].append(one)
    report({"benchmark": "start", "rounds": args.rounds, "servers": configs}, rows_of(starts), args.json)
    return 0

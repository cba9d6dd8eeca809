"""How long running streams stall while a long prompt arrives: batching policies on one node, and two nodes.

  scripts/bench.py interference
  scripts/bench.py interference --setups decode-first dynamic --rounds 3 --json out.json

Real node processes, HTTP, streaming clients. Each server in turn gets --streams streams and, when all of them run, a
prompt of --prompt-tokens tokens that is not cached. The benchmark counts the gaps of the streams between the sending of
the prompt and its first token. The servers alternate, in an order that rotates with each round. `disaggregated` is 1
prefill + 1 decode node, each on its own core; the other servers are one mixed node with all cores.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.bench.common.client import Client, Outcome, greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.flag_types import above_zero, natural, positive
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import pin

FULL = "decode-first"
SETUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    FULL: ("mixed=1", ("--batching-policy", "decode-first")),
    "mixed": ("mixed=1", ("--batching-policy", "mixed")),
    "dynamic": ("mixed=1", ("--batching-policy", "dynamic")),
    "prefill-first": ("mixed=1", ("--batching-policy", "prefill-first")),
    "disaggregated": ("prefill=1,decode=1", ()),
}
"""Name -> (nodes, flags). Ratios refer to the first."""

NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 4000  # more than a round takes; the client closes the streams
SETTLED_TOKENS = 24  # of each stream before the prompt is sent
WARM_TOKENS = 1000  # because the first steps are slow and the first estimates are guesses
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """One server, one long prompt. Milliseconds."""

    setup: str
    gaps: int  # token intervals of the streams while the prompt was prefilled
    alone_p50_ms: float  # before the prompt arrived
    p50_ms: float
    p99_ms: float
    max_ms: float
    ttft_ms: float  # of the long prompt
    tokens_per_s: float  # of all streams together, during the prefill


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--setups", nargs="+", choices=tuple(SETUPS), default=list(SETUPS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds per server (default %(default)s)")
    parser.add_argument("--streams", type=positive, default=4, help="running streams (default %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=4000, help="its length in tokens (default %(default)s)"
    )
    parser.add_argument(
        "--prefill-chunk-tokens", type=positive, default=256, help="chunk of mixed (default %(default)s)"
    )
    parser.add_argument(
        "--tbt-budget-ms", type=above_zero, default=100.0, help="budget of dynamic (default %(default)s)"
    )
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), rounds=1, prompt_tokens=1000)


def start(args: Namespace, name: str, run_dir: Path) -> LocalCluster:
    nodes, policy = SETUPS[name]
    run_dir.mkdir()
    tuned = ("--prefill-chunk-tokens", str(args.prefill_chunk_tokens), "--tbt-budget-ms", str(args.tbt_budget_ms))
    return LocalCluster(nodes, (*NODE_FLAGS, *tuned, *policy), run_dir=run_dir)


async def play(client: Client, args: Namespace, setup: str, number: int, prompt_tokens: int) -> Round:
    """Starts the streams, then sends the prompt. Raises RuntimeError, Unreachable when a request fails."""
    source = TokenSource(args.seed, 32000)
    outcomes = [Outcome() for _ in range(args.streams)]
    specs = [Spec(source.tokens(STREAM_PROMPT_TOKENS, SUFFIX, number, i), STREAM_TOKENS) for i in range(args.streams)]
    streams = [asyncio.create_task(client.send(*pair)) for pair in zip(specs, outcomes, strict=True)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while any(len(outcome.itl_s) < SETTLED_TOKENS for outcome in outcomes):
                _check(streams, outcomes)
                await asyncio.sleep(0.01)
            long = await client.ask(Spec(source.tokens(prompt_tokens, SUFFIX, number, 1000), 1))
            seen = [len(outcome.itl_s) for outcome in outcomes]
            while any(len(o.itl_s) < n + 2 for o, n in zip(outcomes, seen, strict=True)):  # the gaps around its end
                _check(streams, outcomes)
                await asyncio.sleep(0.01)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return gaps_of(setup, outcomes, long)


def _check(streams: Sequence[asyncio.Task[None]], outcomes: Sequence[Outcome]) -> None:
    for task, outcome in zip(streams, outcomes, strict=True):
        if task.done():
            raise RuntimeError(f"a stream ended early: {outcome.error or 'it has all its tokens'}")


def gaps_of(setup: str, outcomes: Sequence[Outcome], long: Outcome) -> Round:
    """A gap counts if a part of it is between the sending of the prompt and its first token."""
    begin, end = long.sent_s, long.sent_s + long.ttft_s
    before, during = [], []
    tokens = 0
    for outcome in outcomes:
        ends = outcome.sent_s + np.cumsum(outcome.itl_s)  # the first is the stream's own TTFT
        for gap, at in zip(outcome.itl_s[1:], ends[1:], strict=True):
            if at < begin:
                before.append(1000 * gap)
            elif at - gap < end:
                during.append(1000 * gap)
                tokens += bool(at <= end)
    p50, p99 = np.percentile(during, (50, 99))
    rate = tokens / long.ttft_s
    return Round(
        setup, len(during), float(np.median(before)), float(p50), float(p99), max(during), 1000 * long.ttft_s, rate
    )


async def measure(args: Namespace, console: Console) -> tuple[list[Round], dict[str, Any]]:
    """All rounds, and the resolved Config of each server."""
    rounds: list[Round] = []
    configs: dict[str, Any] = {}
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interference-")))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=console))
        starting = progress.add_task("servers", total=len(args.setups))
        clusters = {}
        for name in args.setups:
            clusters[name] = stack.enter_context(start(args, name, run_dir / name))
            if name == "disaggregated":
                for index, node in enumerate(clusters[name].nodes):
                    pin(node.pid, index)
            progress.advance(starting)
        async with open_session() as session:
            clients = {}
            for name, cluster in clusters.items():
                clients[name] = await greedy_client(session, name, cluster.nodes[-1].url)
                configs[name] = clients[name].server.config
                await play(clients[name], args, name, args.seed + 10_000, WARM_TOKENS)
            bar = progress.add_task("rounds", total=args.rounds * len(args.setups))
            for number in range(args.rounds):
                for name in args.setups[:: 1 if number % 2 == 0 else -1]:
                    rounds.append(await play(clients[name], args, name, args.seed + number, args.prompt_tokens))
                    progress.advance(bar)
    return rounds, configs


METRICS = (
    ("TBT before, median", "ms", "alone_p50_ms"),
    ("TBT median", "ms", "p50_ms"),
    ("TBT p99", "ms", "p99_ms"),
    ("TBT max", "ms", "max_ms"),
    ("TTFT of the prompt", "ms", "ttft_ms"),
    ("stream tokens", "tokens/s", "tokens_per_s"),
)


def rows_of(rounds: Sequence[Round], args: Namespace) -> list[Row]:
    """Median of each number over rounds; the maximum for the longest gap."""
    values: dict[tuple[str, str], float] = {}
    present = [name for name in SETUPS if any(r.setup == name for r in rounds)]
    for name in present:
        for _, _, key in METRICS:
            seen = [getattr(r, key) for r in rounds if r.setup == name]
            values[name, key] = max(seen) if key == "max_ms" else median(seen)
    counts = {name: sum(r.setup == name for r in rounds) for name in present}
    gaps = {name: min(r.gaps for r in rounds if r.setup == name) for name in present}
    note = (
        f"{args.streams} streams, a prompt of {args.prompt_tokens} tokens; rounds: {counts}; gaps of the round with "
        f"the fewest: {gaps}"
    )
    return [
        Row(
            name,
            metric,
            unit,
            values[name, key],
            {FULL: values.get((FULL, key))},
            note=note,
            samples={"ours": gaps[name]} | ({FULL: gaps[FULL]} if FULL in gaps else {}),
        )
        for metric, unit, key in METRICS
        for name in present
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rounds, configs = asyncio.run(measure(args, Console(stderr=True)))
    except KeyboardInterrupt:
        return 130
    flags_used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    config = {"benchmark": "interference", **flags_used, "servers": configs}
    report(config | {"rounds_measured": [asdict(r) for r in rounds]}, rows_of(rounds, args), args.json)
    return 0

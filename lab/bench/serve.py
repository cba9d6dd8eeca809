"""Open-loop serving benchmark against any OpenAI server; metrics and flags as in `vllm bench serve`.

  scripts/bench.py serve --quick
  scripts/bench.py serve --request-rate 4 --num-prompts 200 --goodput ttft:500 tpot:50 --json out.json
  scripts/bench.py serve --dataset-name trace --dataset-path conversation_trace.jsonl.xz --time-scale 2
  scripts/bench.py serve --request-rate 4 --peer vllm=http://127.0.0.1:8001

With --peer the requests are split into rounds; each round goes to every server, in alternating order, before the next
begins, so that slow drifts of the machine affect all of them. OPENAI_API_KEY is sent when it is set.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.bench.common.client import Client, Server, Unreachable, find_server, open_session
from lab.bench.common.datasets import INF, build_specs, case_name
from lab.bench.common.latency import Measured, summarize
from lab.bench.common.results import Row, report
from lab.bench.common.serve_flags import OURS, parse
from lab.bench.common.workload import WARMUP, Spec, TokenSource, in_rounds

WARMUP_INPUT, WARMUP_OUTPUT = 128, 8
PER_REQUEST = ("ttft", "tpot", "tbt", "e2el")
"""Metrics of which each request has at most one value."""


@dataclass(slots=True)
class Benchmark:
    """Everything measured in one call of the script."""

    offered: float  # requests/s of the schedule; inf = all together
    runs: dict[str, list[Measured]] = field(default_factory=dict)  # by server name
    servers: list[Server] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # peer -> why it could not be measured
    left_out: int = 0  # requests longer than a server's context


async def measure(args: Namespace, console: Console) -> Benchmark:
    """Raises Unreachable when our own server cannot be measured, ValueError for a workload that cannot be sent."""
    specs = build_specs(args)
    async with open_session() as session:
        bench, clients = await ready(args, session)
        fit = fitting(specs, bench.servers)
        bench.left_out = len(specs) - len(fit)
        bench.offered = len(fit) / fit[-1].at_s if fit[-1].at_s > 0 else INF
        await run_rounds(args, in_rounds(fit, args.rounds), clients, bench, console)
    return bench


async def ready(args: Namespace, session: aiohttp.ClientSession) -> tuple[Benchmark, dict[str, Client]]:
    """Find every server and send it test requests; a peer that fails is recorded as missing."""
    bench, clients = Benchmark(offered=INF), {}
    body = {"temperature": args.temperature, "ignore_eos": args.ignore_eos} | args.extra_body
    for name, url in [(OURS, args.base_url), *args.peer]:
        try:
            server = await find_server(session, name, url, args.model)
            client = Client(session, server, args.backend, body)
            await warm_up(client, server, args)
        except Unreachable as error:
            if name == OURS:
                raise
            bench.missing[name] = str(error)
            continue
        bench.servers.append(server)
        clients[name] = client
    return bench, clients


async def warm_up(client: Client, server: Server, args: Namespace) -> None:
    """One request that must succeed, then --num-warmups more. Raises Unreachable with the server's message."""
    source = TokenSource(args.seed, args.vocab_size)
    size = min(WARMUP_INPUT, (server.max_model_len or WARMUP_INPUT) // 2)
    for index in range(1 + args.num_warmups):
        await client.ask(Spec(source.tokens(size, WARMUP, index), WARMUP_OUTPUT), "test request")


def fitting(specs: Sequence[Spec], servers: Sequence[Server]) -> list[Spec]:
    """The requests that fit every server's context. Raises ValueError when there is none."""
    limit = min((server.max_model_len for server in servers if server.max_model_len), default=INF)
    fit = [spec for spec in specs if len(spec.token_ids) + spec.output_len <= limit]
    if not fit:
        raise ValueError(f"no request fits a context of {limit} tokens; send shorter ones (trace: --length-scale)")
    return fit


async def run_rounds(
    args: Namespace, rounds: Sequence[Sequence[Spec]], clients: dict[str, Client], bench: Benchmark, console: Console
) -> None:
    """Run every round on every server; the order rotates with each round."""
    bench.runs = {name: [] for name in clients}
    deadline_s = args.deadline_s / len(rounds) / len(clients)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=args.disable_tqdm) as progress:
        for number, specs in enumerate(rounds):
            for name in list(clients)[:: 1 if number % 2 == 0 else -1]:
                bar = progress.add_task(f"{name}, round {number + 1} of {len(rounds)}", total=len(specs))
                on_done = partial(progress.advance, bar)
                outcomes, duration = await clients[name].run(specs, args.max_concurrency, deadline_s, on_done)
                bench.runs[name].append(Measured(outcomes, duration))


def rows_of(args: Namespace, bench: Benchmark) -> list[Row]:
    """One row per metric; a missing peer's value is None."""
    wanted = (args.percentile_metrics, args.metric_percentiles, args.goodput)
    summaries = {name: summarize(runs, *wanted) for name, runs in bench.runs.items()}
    notes = [f"peer {name} is missing: {reason}" for name, reason in bench.missing.items()]
    if bench.left_out:
        notes.append(f"{bench.left_out} requests longer than the context were left out")
    for name, runs in bench.runs.items():
        if any(o.error is None and not o.usage_given for run in runs for o in run.outcomes):
            notes.append(f"{name} sends no usage: its output tokens are counted as events")
    rows = []
    for metric, (value, unit) in summaries[OURS].items():
        peers = {name: summaries.get(name, {}).get(metric, (None, unit))[0] for name, _ in args.peer}
        bounded = metric in ("request_throughput", "request_goodput") and bench.offered != INF
        limits = {"offered": bench.offered} if bounded else {}
        row = Row(case_name(args), metric, unit, value, peers, limits, "; ".join(notes))
        rows.append(replace(row, samples=completed(summaries)) if of_requests(metric) else row)
    return rows


def of_requests(metric: str) -> bool:
    """Whether it is a percentile of one value per request, like p99_ttft."""
    return metric.startswith("p") and metric.partition("_")[2] in PER_REQUEST


def completed(summaries: Mapping[str, Mapping[str, tuple[float, str]]]) -> dict[str, int]:
    """Server -> its requests that count."""
    return {name: int(found["completed"][0]) for name, found in summaries.items()}


def config_of(args: Namespace, bench: Benchmark) -> dict[str, Any]:
    """Every flag as used, and the servers as found."""
    flags = {
        name: str(value) if isinstance(value, Path) or value == INF else value for name, value in vars(args).items()
    }
    servers = [asdict(server) for server in bench.servers]
    return {"benchmark": "serve", **flags, "servers": servers, "peers_missing": bench.missing}


def failures(bench: Benchmark) -> list[str]:
    """The most frequent errors of each server, one line each."""
    lines = []
    for name, runs in bench.runs.items():
        errors = Counter(o.error for run in runs for o in run.outcomes if o.error is not None)
        lines += [f"{name}: {count} requests failed: {error}" for error, count in errors.most_common(3)]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """0 = measured, 1 = no request of ours succeeded, 2 = wrong flags or no server."""
    args = parse(argv, str(__doc__))
    console = Console(stderr=True)
    try:
        bench = asyncio.run(measure(args, console))
    except (Unreachable, ValueError, OSError) as error:
        print(f"scripts/bench.py serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for line in failures(bench):
        print(f"scripts/bench.py serve: {line}", file=sys.stderr)
    rows = rows_of(args, bench)
    report(config_of(args, bench), rows, args.json)
    return 0 if any(row.metric == "completed" and row.ours for row in rows) else 1

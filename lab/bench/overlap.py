"""How much of a prompt's KV transfer overlaps with its prefill: --kv-overlap none, chunk, layer with push and pull.

  scripts/bench.py overlap
  scripts/bench.py overlap --overlaps layer none --transfers push --rail-limit 20000000 --json o.json --trace t.json

Each case starts one prefill and one decode node, each on its own core if there are two; cases run one after the other.
The prompt of --prompt-tokens tokens is not cached; the median of --rounds counts. The second token is the first that
needs the KV on the decode node, so a user sees the transfer as the time from the first to the second token.
--rail-limit is passed to the nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from lab.bench.common.client import Outcome, greedy_client
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import pin
from lab.tools.perfetto import chrome_trace

NODE_FLAGS = ("--kv-cache-bytes", "400M", "--no-enable-prefix-caching", "--transport", "tcp")
WARM_TOKENS = 600
NEW_TOKENS = 4
METRICS = (
    ("transfer", "ms", "transfer_ms"),
    ("hidden", "ms", "hidden_ms"),
    ("overlap efficiency", "", "efficiency"),
    ("TTFT", "ms", "ttft_ms"),
    ("first to second token", "ms", "second_ms"),
    ("time to second token", "ms", "both_ms"),
)


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt through one case. Milliseconds."""

    case: str
    transfer_ms: float  # time in which bytes of the prompt's KV were on their way
    hidden_ms: float  # the part of it in which the prompt was also computed
    efficiency: float
    ttft_ms: float
    second_ms: float
    nbytes: int

    @property
    def both_ms(self) -> float:
        """Time to the second token. A transfer that delays the first token (the event loops send KV) shows here, not in
        the gap."""
        return self.ttft_ms + self.second_ms


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--overlaps", nargs="+", choices=("none", "chunk", "layer"), default=["none", "chunk", "layer"])
    parser.add_argument("--transfers", nargs="+", choices=("push", "pull"), default=["push", "pull"])
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per case (default %(default)s)")
    parser.add_argument("--rail-limit", metavar="BYTES", help="bytes/s of each rail, as --rail-limit of a node")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens of a prefill step (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write the last request as a Chrome trace to PATH")
    parser.add_argument("node_flags", nargs="*", metavar="-- FLAG", help="more flags of every node, after --")
    return quicken(parser.parse_args(argv), rounds=1, prompt_tokens=1000)


def round_of(case: str, record: dict[str, Any], outcome: Outcome) -> Round:
    """Computed from the request's timeline and the client's clock."""
    moved = [event["detail"] for event in record["events"] if event["event"] == "kv_moved"]
    hidden, share = record["summary"]["transfer_hidden_ms"], record["summary"]["overlap_efficiency"]
    return Round(
        case,
        transfer_ms=hidden / share if share else sum(1000 * detail["seconds"] for detail in moved),
        hidden_ms=hidden,
        efficiency=share,
        ttft_ms=1000 * outcome.ttft_s,
        second_ms=1000 * outcome.itl_s[0],
        nbytes=sum(detail["bytes"] for detail in moved),
    )


async def ask(url: str, tokens: list[int], case: str) -> tuple[Round, dict[str, Any]]:
    """Send one prompt; returns its numbers and its timeline. Raises Unreachable when it fails."""
    request_id = f"overlap-{os.urandom(6).hex()}"
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, headers={"X-Request-Id": request_id}) as session:
        client = await greedy_client(session, case, url)
        outcome = await client.ask(Spec(tokens, NEW_TOKENS))
    record = await asyncio.to_thread(rest.get, f"{url}/debug/requests/{request_id}")
    return round_of(case, record, outcome), record


async def measure(args: Namespace, case: str, url: str) -> tuple[list[Round], dict[str, Any]]:
    """Runs all rounds of one running case; also returns the last timeline."""
    source = TokenSource(args.seed, 32000)
    await ask(url, source.tokens(WARM_TOKENS, SUFFIX, 10_000, 0), case)
    rounds: list[Round] = []
    record: dict[str, Any] = {}
    for number in range(args.rounds):
        done, record = await ask(url, source.tokens(args.prompt_tokens, SUFFIX, number, 0), case)
        rounds.append(done)
    return rounds, record


def run_case(args: Namespace, transfer: str, overlap: str, run_dir: Path) -> tuple[list[Round], dict[str, Any]]:
    case = f"{transfer}, {overlap}"
    wanted = ("--kv-transfer", transfer, "--kv-overlap", overlap, "--max-num-batched-tokens", str(args.chunk_tokens))
    limit = ("--rail-limit", args.rail_limit) if args.rail_limit else ()
    run_dir.mkdir()
    with LocalCluster("prefill=1,decode=1", (*NODE_FLAGS, *wanted, *limit, *args.node_flags), run_dir=run_dir) as nodes:
        for index, node in enumerate(nodes.nodes):
            pin(node.pid, index)
        return asyncio.run(measure(args, case, nodes["decode-0"].url))


def rows_of(rounds: Sequence[Round], note: str) -> list[Row]:
    """The median of each number; `peers` is the same transfer with --kv-overlap none, if it was measured."""
    cases = list(dict.fromkeys(one.case for one in rounds))
    values = {
        (case, key): median(getattr(one, key) for one in rounds if one.case == case)
        for case in cases
        for _, _, key in METRICS
    }
    return [
        Row(
            case, metric, unit, values[case, key], {"none": values.get((f"{case.split(',')[0]}, none", key))}, note=note
        )
        for metric, unit, key in METRICS
        for case in cases
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    rounds: list[Round] = []
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        for transfer in args.transfers:
            for overlap in args.overlaps:
                print(f"{transfer}, {overlap} ...", file=sys.stderr, flush=True)
                done, record = run_case(args, transfer, overlap, Path(folder) / f"{transfer}-{overlap}")
                rounds += done
    note = f"{args.prompt_tokens} prompt tokens, {rounds[-1].nbytes:,} bytes of KV, {args.rounds} rounds"
    note += f", at most {args.rail_limit} bytes/s" if args.rail_limit else ", no limit on the bandwidth"
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    config = {"benchmark": "overlap", **used, "rounds_measured": [asdict(one) for one in rounds]}
    report(config, rows_of(rounds, note), args.json)
    if args.trace:
        args.trace.write_text(json.dumps(chrome_trace(record)))
        print(f"trace of the last request: {args.trace}")
    return 0

"""Measures dispatch and combine between ranks with experts, next to gloo's all_to_all and memcpy.

  scripts/bench.py experts                          # 2, 4 and 8 ranks, 1 to 4,096 tokens, H 2,048 to 7,168, top 8
  scripts/bench.py experts --quick --json experts.json

Rank 0 has the tokens; each goes once to every rank that has one of its experts, and a row per token and rank comes back
and is added up. The ranks answer at once, so that only the way is measured. A rate is the bytes of both ways by the
median time of a round. Exit code 1: a case is not twice as fast as gloo, or a case of --large-bytes and more does not
reach 0.7 of memcpy; or ranks failed, and the result has the cases before them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.common.results import Row, add_result_flags, report
from lab.flag_types import positive

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "lab.bench.experts.rank_program"
GLOO, MEMCPY = 2.0, 0.7
TIMEOUT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 32, 256, 4096], help="tokens of a step")
    parser.add_argument("--hidden", type=positive, nargs="+", default=[2048, 4096, 7168], help="elements of a row")
    parser.add_argument("--experts", type=positive, default=64, help="experts of a layer")
    parser.add_argument("--top-k", type=positive, default=8, help="experts of a token")
    parser.add_argument("--large-bytes", type=positive, default=16 << 20, help="from here on memcpy is the measure")
    parser.add_argument("--rounds", type=positive, default=7, help="rounds of each contender")
    args = parser.parse_args(arguments)
    if args.quick:
        args.ranks, args.tokens, args.hidden, args.rounds = [2], [1, 256], [2048], 2
    for ranks in args.ranks:
        if ranks < 2 or args.experts % ranks:
            parser.error(f"--ranks {ranks}: at least 2, which have equal numbers of the {args.experts} --experts")
    if args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k}: there are {args.experts} --experts")
    rows: list[Row] = []
    broken = ""
    for ranks in args.ranks:
        cases = [f"{tokens},{hidden},{args.experts},{args.top_k}" for hidden in args.hidden for tokens in args.tokens]
        try:
            found = measure(ranks, cases, args.rounds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            broken = f"{ranks} ranks: {error}"
            break
        for case, times, nbytes in found:
            rows += rows_of(ranks, case, times, nbytes, args.large_bytes)
    report({name: value for name, value in vars(args).items() if name != "json"}, rows, args.json)
    missed = [one for one in rows if one.metric == "rate" and below(one)]
    for one in missed:
        print(f"below its goal: {one.case}: {one.ours:.3g} GB/s, {below(one)}")
    if broken:
        print(f"bench.py experts: {broken}", file=sys.stderr)
    return 1 if missed or broken else 0


def rows_of(ranks: int, case: str, times: dict[str, list[float]], nbytes: int, large_bytes: int) -> list[Row]:
    """Latency and rate of one case."""
    tokens, hidden, _, top_k = case.split(",")
    name = f"ranks={ranks} tokens={tokens} hidden={hidden} top_k={top_k}"
    half = {who: median(seconds) for who, seconds in times.items()}
    rates = {who: nbytes / seconds / 1e9 for who, seconds in half.items()}
    limits = {"goal x gloo": GLOO * rates["gloo"]}
    if nbytes >= large_bytes:
        limits |= {"goal x memcpy": MEMCPY * rates["memcpy"]}
    return [
        Row(name, "round", "us", 1e6 * half["ours"], {"gloo": 1e6 * half["gloo"], "memcpy": 1e6 * half["memcpy"]}),
        Row(name, "rate", "GB/s", rates["ours"], {"gloo": rates["gloo"], "memcpy": rates["memcpy"]}, limits),
    ]


def below(row: Row) -> str:
    """The goals that a rate misses; empty if it meets all."""
    return ", ".join(f"{name}: {goal:.3g}" for name, goal in row.limits.items() if (row.ours or 0) < goal)


def measure(ranks: int, cases: Sequence[str], rounds: int) -> list[Any]:
    """The output of rank 0. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(Path(folder) / "store"), str(rounds), *cases]
        commands = [[sys.executable, "-P", "-m", PROGRAM, str(rank), str(ranks), *given] for rank in range(ranks)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        running = [subprocess.Popen(one, env=env, stdout=subprocess.PIPE, text=True) for one in commands]
        try:
            texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(running) if process.returncode]
    if failed:
        raise RuntimeError(f"ranks {failed} failed; their errors are above")
    found: list[Any] = json.loads(texts[0])
    return found

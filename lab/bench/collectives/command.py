"""Measures the collectives of our process group of torch.distributed next to those of gloo, on one host.

  scripts/bench.py collectives                      # 2 and 4 ranks, 4K to 64M
  scripts/bench.py collectives --quick --json collectives.json

Gloo and ours take turns in the same processes, with one thread per rank. A rate is the bytes of a call on one rank (the
input; the output of all_gather) by the median time of a call. memcpy: all ranks copy that many bytes at once. Exit code
1: all_reduce is slower than gloo's, or all_to_all is not 1.5 times as fast; or ranks failed, and the result has the
collectives of fewer ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.common.results import Row, add_result_flags, report
from lab.conformance.answers import ours
from lab.flag_types import positive

PROGRAM = Path(__file__).with_name("rank_program.py")
SIZES = tuple(4096 << shift for shift in range(0, 15, 2))  # 4K, 16K, ... 64M
GOALS = {"all_reduce": 1.0, "all_to_all": 1.5}
TIMEOUT_S = 1800.0
ITEM_BYTES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--sizes", type=positive, nargs="+", default=list(SIZES), help="bytes per rank and call")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds of each contender")
    args = parser.parse_args(arguments)
    if args.quick:
        args.sizes, args.rounds = [4096, 1 << 20, 16 << 20], 3
    for ranks, nbytes in product(args.ranks, args.sizes):
        if nbytes % (ITEM_BYTES * ranks):
            parser.error(f"--sizes {nbytes}: {ranks} ranks divide no such number of float32 elements")
    rows: list[Row] = []
    broken = ""
    for ranks in args.ranks:
        try:
            found = measure(ranks, args.sizes, args.rounds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            broken = f"{ranks} ranks: {error}"
            break
        rows += [row(ranks, name, nbytes, times) for name, nbytes, times in found]
    report({name: value for name, value in vars(args).items() if name != "json"}, rows, args.json)
    short = missed(rows)
    for one in short:
        print(f"below the goal of {GOALS[one.metric]} x gloo: {one.metric}, {one.case}")
    if broken:
        print(f"bench.py collectives: {broken}", file=sys.stderr)
    return 1 if short or broken else 0


def row(ranks: int, name: str, nbytes: int, times: dict[str, list[float]]) -> Row:
    """One collective at one size: GB/s, for a barrier thousands of calls a second."""
    work, unit = (nbytes / 1e9, "GB/s") if nbytes else (1e-3, "1000/s")
    rates = {who: work / median(seconds) for who, seconds in times.items()}
    limits = {"memcpy": rates["memcpy"]} if "memcpy" in rates else {}
    return Row(f"ranks={ranks} bytes={nbytes}", name, unit, rates["ours"], {"gloo": rates["gloo"]}, limits)


def missed(rows: Sequence[Row]) -> list[Row]:
    """Those below their goal."""
    aims = [one for one in rows if one.metric in GOALS]
    return [one for one in aims if (one.ours or 0) < GOALS[one.metric] * (one.peers["gloo"] or 0)]


def measure(ranks: int, sizes: Sequence[int], rounds: int) -> list[Any]:
    """What rank 0 printed. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(Path(folder) / "store"), str(rounds), ",".join(map(str, sizes))]
        commands = [[sys.executable, "-P", str(PROGRAM), str(rank), str(ranks), *given] for rank in range(ranks)]
        env = ours() | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::FutureWarning"}
        running = [subprocess.Popen(one, cwd="/", env=env, stdout=subprocess.PIPE, text=True) for one in commands]
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

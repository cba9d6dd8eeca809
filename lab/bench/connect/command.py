"""mooncake.store on our pool next to upstream's released wheel, through the same Python calls, in one run.

    scripts/bench.py connect [--quick] [--json PATH] [--peer-python PATH]

Ours: three store nodes, clients over shared memory (shm) and with MC_FORCE_TCP=1 (tcp). Upstream: its master, one
process with a segment, clients over TCP; installed in the interpreter that --peer-python names. Every put has new keys;
every value is compared at the end of each round. Contenders take turns within each cell, so that they share the noise
of the machine; only ratios within one run are meaningful. `pieces`: a value of many pieces of memory, as vLLM puts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.connect.client_program import SMALL_BYTES
from lab.conformance.answers import SITE
from lab.conformance.record import master
from lab.flag_types import above_zero, positive
from lab.launch.cluster import LocalCluster

PROGRAM = Path(__file__).with_name("client_program.py")
NODES, FLAGS = "store=3", ("--model", "none", "--dram-bytes", "1G")
VALUE_BYTES = {"small": "64K", "large": "4M"}
"""Two pools of ours: a value takes a slot, so small values have one with small slots."""

SEGMENT_BYTES = 3 << 30
KIB = 1 << 10
SHAPES = {
    "4K": (4 * KIB, 1, 1),
    "32 x 4K": (4 * KIB, 1, 32),
    "368K": (368 * KIB, 1, 1),
    "1M": (1024 * KIB, 1, 1),
    "8 x 1M": (1024 * KIB, 1, 8),
    "2.95M in 30 pieces": (30 * 98_304, 30, 1),
    "4 x 2.95M in 30 pieces": (30 * 98_304, 30, 4),
}
"""Name -> bytes of a value, pieces of a value, values of a call."""

CLIENTS = (1, 4)
OURS = {"shm": {}, "tcp": {"MC_FORCE_TCP": "1"}}


class Clients:
    """Processes of one contender."""

    def __init__(self, stack: ExitStack, python: str, address: str, env: Mapping[str, str], segment_bytes: int) -> None:
        self._make = lambda: stack.enter_context(_client(python, address, env, segment_bytes))
        self._processes: list[subprocess.Popen[str]] = []

    def measure(self, count: int, question: Mapping[str, Any]) -> list[float]:
        """Seconds of all calls of `count` clients that run at the same time."""
        while len(self._processes) < count:
            self._processes.append(self._make())
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        answers = [_line(process) for process in self._processes[:count]]
        if wrong := [answer for answer in answers if isinstance(answer, str)]:
            raise RuntimeError(wrong[0])
        return [second for answer in answers for second in answer]


def _line(process: subprocess.Popen[str]) -> Any:
    """The next answer; other lines on standard output are not ours. Raises RuntimeError if the client has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("[", '"')):
            return json.loads(line)
    raise RuntimeError(f"a client ended with {process.wait()}")


@contextmanager
def _client(python: str, address: str, env: Mapping[str, str], segment_bytes: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, str(PROGRAM), address, str(segment_bytes)],
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
    )
    try:
        assert _line(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def contenders(stack: ExitStack, peer_python: Path | None) -> dict[str, dict[str, Clients]]:
    """By size of the values, then by name; all servers run until the stack ends."""
    made: dict[str, dict[str, Clients]] = {}
    for kind, value_bytes in VALUE_BYTES.items():
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(NODES, (*FLAGS, "--value-bytes", value_bytes), run_dir=run_dir))
        address = ",".join(node.url.removeprefix("http://") for node in cluster.nodes)
        site = {"PYTHONPATH": str(SITE)}
        made[kind] = {name: Clients(stack, sys.executable, address, site | env, 0) for name, env in OURS.items()}
    if peer_python is not None:
        at = stack.enter_context(master(peer_python.parent.parent))
        stack.enter_context(_client(str(peer_python), at, {}, SEGMENT_BYTES))  # it holds the segment
        upstream = Clients(stack, str(peer_python), at, {}, 0)
        for clients in made.values():
            clients["upstream"] = upstream
    return made


def cells(args: Namespace) -> Iterator[Row]:
    """Per cell and transport of ours: median and 99th percentile of a call in microseconds."""
    with ExitStack() as stack:
        all_made = contenders(stack, args.peer_python)
        for clients in CLIENTS:
            for name, (size, pieces, count) in SHAPES.items():
                made = all_made["small" if size <= SMALL_BYTES else "large"]
                for op in ("put", "get"):
                    question = {"op": op, "size": size, "pieces": pieces, "count": count, "seconds": args.seconds}
                    took: dict[str, list[float]] = {name: [] for name in made}
                    for turn in range(args.rounds):
                        names = list(made)
                        for one in names[turn % len(names) :] + names[: turn % len(names)]:
                            took[one] += made[one].measure(clients, question)
                    case = f"{op} {name}, {clients} client{'s' * (clients > 1)}"
                    for transport in OURS:
                        yield from _rows(f"{case}, {transport}", took[transport], took.get("upstream"))


def _rows(case: str, ours: Sequence[float], theirs: Sequence[float] | None) -> list[Row]:
    rows = []
    for metric, share in (("p50", 0.5), ("p99", 0.99)):
        peers: dict[str, float | None] = {} if theirs is None else {"upstream": _at(theirs, share)}
        rows.append(Row(case, metric, "us", _at(ours, share), peers))
    return rows


def _at(seconds: Sequence[float], share: float) -> float:
    """Microseconds."""
    if share == 0.5:
        return round(1e6 * median(seconds), 1)
    return round(1e6 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("bench.py connect", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each contender per cell (%(default)s)")
    parser.add_argument("--seconds", type=above_zero, default=0.5, help="length of a turn (%(default)s)")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="an interpreter that has upstream's wheel")
    add_result_flags(parser)
    args = quicken(parser.parse_args(argv), rounds=2, seconds=0.1)
    rows = list(cells(args))
    config = {"rounds": args.rounds, "seconds": args.seconds, "nodes": NODES, "flags": list(FLAGS)}
    config["value_bytes"] = list(VALUE_BYTES.values())
    report(config, rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

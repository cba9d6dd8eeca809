"""mooncake.store: clients of our pool, over shared memory and over TCP, and of upstream's wheel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lab.bench.common.results import Row
from lab.bench.connect.client_program import SMALL_BYTES
from lab.bench.connect.latencies import rows
from lab.bench.connect.programs import line, program, tell
from lab.conformance.answers import SITE
from lab.conformance.record import master
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
            tell(process, question)
        answers = [line(process) for process in self._processes[:count]]
        if wrong := [answer for answer in answers if isinstance(answer, str)]:
            raise RuntimeError(wrong[0])
        return [second for answer in answers for second in answer]


@contextmanager
def _client(python: str, address: str, env: Mapping[str, str], segment_bytes: int) -> Iterator[subprocess.Popen[str]]:
    with program([python, str(PROGRAM), address, str(segment_bytes)], env) as process:
        assert line(process) == "ready"
        yield process


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


def cells(all_made: Mapping[str, Mapping[str, Clients]], rounds: int, seconds: float) -> Iterator[Row]:
    """Per cell and transport of ours: median and 99th percentile of a call in microseconds."""
    for clients in CLIENTS:
        for name, (size, pieces, count) in SHAPES.items():
            made = all_made["small" if size <= SMALL_BYTES else "large"]
            for op in ("put", "get"):
                question = {"op": op, "size": size, "pieces": pieces, "count": count, "seconds": seconds}
                took: dict[str, list[float]] = {name: [] for name in made}
                for turn in range(rounds):
                    names = list(made)
                    for one in names[turn % len(names) :] + names[: turn % len(names)]:
                        took[one] += made[one].measure(clients, question)
                case = f"{op} {name}, {clients} client{'s' * (clients > 1)}"
                peers = {"upstream": took["upstream"]} if "upstream" in took else {}
                for transport in OURS:
                    yield from rows(f"{case}, {transport}", took[transport], peers, {})

"""mooncake.store: clients of our pool, over shared memory and over TCP, and of upstream's wheel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.common.results import Row
from lab.bench.connect.client_program import SMALL_BYTES
from lab.bench.connect.latencies import in_turns, rows
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
TRIES = 2  # of a peer in one round of a cell: it is started again once
OURS = {"shm": {}, "tcp": {"MC_FORCE_TCP": "1"}}


class Clients:
    """Processes of one contender, started when they are first needed, and again after a failure."""

    def __init__(self, python: str, env: Mapping[str, str], serve: Callable[[ExitStack], str]) -> None:
        """serve: starts the servers that end with the clients, if there are any; returns the address."""
        self._python, self._env, self._serve = python, env, serve
        self._stack: ExitStack | None = None
        self._address = ""
        self._processes: list[subprocess.Popen[str]] = []

    def measure(self, count: int, question: Mapping[str, Any]) -> list[float]:
        """Seconds of all calls of `count` clients that run at the same time. Raises RuntimeError; the next call starts
        all processes again."""
        try:
            return self._measured(count, question)
        except (OSError, RuntimeError) as error:
            self.close()
            raise RuntimeError(str(error)) from None

    def _measured(self, count: int, question: Mapping[str, Any]) -> list[float]:
        if self._stack is None:
            self._stack = ExitStack()
            self._address = self._serve(self._stack)
        while len(self._processes) < count:
            client = _client(self._python, self._address, self._env, 0)
            self._processes.append(self._stack.enter_context(client))
        for process in self._processes[:count]:
            tell(process, question)
        answers = [line(process) for process in self._processes[:count]]
        if wrong := [answer for answer in answers if isinstance(answer, str)]:
            raise RuntimeError(wrong[0])
        return [second for answer in answers for second in answer]

    def close(self) -> None:
        """End its processes. Idempotent."""
        if self._stack is not None:
            self._stack.close()
            self._stack, self._processes = None, []


@contextmanager
def _client(python: str, address: str, env: Mapping[str, str], segment_bytes: int) -> Iterator[subprocess.Popen[str]]:
    with program([python, str(PROGRAM), address, str(segment_bytes)], env) as process:
        if (ready := line(process)) != "ready":
            raise RuntimeError(f"a program began with {ready!r}")
        yield process


def contenders(stack: ExitStack, peer_python: Path | None) -> dict[str, dict[str, Clients]]:
    """By size of the values, then by name; all servers of ours run until the stack ends, like all clients."""
    made: dict[str, dict[str, Clients]] = {}
    for kind, value_bytes in VALUE_BYTES.items():
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(NODES, (*FLAGS, "--value-bytes", value_bytes), run_dir=run_dir))
        address = ",".join(node.url.removeprefix("http://") for node in cluster.nodes)
        site = {"PYTHONPATH": str(SITE)}
        made[kind] = {
            name: Clients(sys.executable, site | env, partial(_already_at, address)) for name, env in OURS.items()
        }
    if peer_python is not None:
        upstream = Clients(str(peer_python), {}, partial(_upstream, peer_python))
        for clients in made.values():
            clients["upstream"] = upstream
    for one in (client for clients in made.values() for client in clients.values()):
        stack.callback(one.close)
    return made


def _already_at(address: str, _: ExitStack) -> str:
    return address


def _upstream(python: Path, stack: ExitStack) -> str:
    """The address of a new master, next to which a process holds the segment."""
    at = stack.enter_context(master(python.parent.parent))
    stack.enter_context(_client(str(python), at, {}, SEGMENT_BYTES))
    return at


def measured(
    made: Mapping[str, Clients], count: int, question: Mapping[str, Any], failures: list[str], name: str
) -> list[float]:
    """Seconds of the calls of `name`; none, and more `failures`, if a peer has failed TRIES times. Raises RuntimeError
    if one of ours has failed."""
    for _ in range(TRIES):
        try:
            return made[name].measure(count, question)
        except RuntimeError as error:
            if name in OURS:
                raise
            failures.append(f"{name}, {question['op']} of {question['size']} bytes: {error}")
    return []


def cells(
    all_made: Mapping[str, Mapping[str, Clients]], rounds: int, seconds: float, failures: list[str]
) -> Iterator[Row]:
    """Per cell and transport of ours: median and 99th percentile of a call in microseconds. `failures`: of peers, which
    cost them a start or a cell, are added."""
    for clients in CLIENTS:
        for name, (size, pieces, count) in SHAPES.items():
            made = all_made["small" if size <= SMALL_BYTES else "large"]
            for op in ("put", "get"):
                question = {"op": op, "size": size, "pieces": pieces, "count": count, "seconds": seconds}
                took = in_turns(made, rounds, partial(measured, made, clients, question, failures))
                case = f"{op} {name}, {clients} client{'s' * (clients > 1)}"
                peers = {"upstream": took["upstream"]} if "upstream" in took else {}
                for transport in OURS:
                    yield from rows(f"{case}, {transport}", took[transport], peers, {})

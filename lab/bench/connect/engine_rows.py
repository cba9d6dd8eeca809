"""mooncake.engine between two programs of this host: ours in two ways, upstream's wheel, and memcpy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.common.results import Row
from lab.bench.connect.latencies import in_turns, rows
from lab.bench.connect.programs import line, program, tell
from lab.conformance.answers import SITE

PROGRAM = str(Path(__file__).with_name("engine_program.py"))
KIB = 1 << 10
SHAPES = {
    "4K": (4 * KIB, 1, 1),
    "32 x 4K": (4 * KIB, 1, 32),
    "368K": (368 * KIB, 1, 1),
    "8 x 368K": (368 * KIB, 1, 8),
    "1M": (1024 * KIB, 1, 1),
    "8 x 1M": (1024 * KIB, 1, 8),
    "2.95M in 30 pieces": (30 * 98_304, 30, 1),
    "16M": (16 * 1024 * KIB, 1, 1),
}
"""Name -> bytes of a value, pieces of a value, values of a call. One piece in a call is a single call, more are a
batch call."""

TCP, ONE_HOST = "tcp", "one host"
OURS = {TCP: {"MC_FORCE_TCP": "1"}, ONE_HOST: {}}
TRIES = 2  # of a peer in one cell: it is started again once


class Pair:
    """The programs of one contender, started when they are first needed, and again when one has ended."""

    def __init__(self, python: str, env: Mapping[str, str], kind: str = "client") -> None:
        self._python, self._env, self._kind = python, env, kind
        self._stack: ExitStack | None = None
        self._client: Any = None

    def measure(self, question: Mapping[str, Any]) -> list[float]:
        """Seconds of the calls. Raises RuntimeError; the next call starts the programs again."""
        try:
            if self._stack is None:
                self._start()
            tell(self._client, question)
            answer = line(self._client)
        except (OSError, RuntimeError) as error:
            self.close()
            raise RuntimeError(str(error)) from None
        if isinstance(answer, str):
            self.close()
            raise RuntimeError(answer)
        return list(answer)

    def _start(self) -> None:
        stack = self._stack = ExitStack()
        arguments: list[str] = []
        if self._kind == "client":
            owner = stack.enter_context(program([self._python, PROGRAM, "owner"], self._env))
            port, address = line(owner)
            arguments = [f"127.0.0.1:{port}", str(address)]
        self._client = stack.enter_context(program([self._python, PROGRAM, self._kind, *arguments], self._env))
        if (ready := line(self._client)) != "ready":
            raise RuntimeError(f"a program began with {ready!r}")

    def close(self) -> None:
        """End the programs. Idempotent."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None


class Contenders:
    """All pairs. `failures`: what went wrong with peers, which costs them a start or a cell."""

    def __init__(self, peer_python: Path | None, failures: list[str]) -> None:
        site = {"PYTHONPATH": str(SITE)}
        self.pairs = {name: Pair(sys.executable, site | env) for name, env in OURS.items()}
        self.pairs["memcpy"] = Pair(sys.executable, {}, "memcpy")
        if peer_python is not None:
            self.pairs["upstream"] = Pair(str(peer_python), {})
        self.failures = failures

    def measure(self, question: Mapping[str, Any], name: str) -> list[float]:
        """Seconds of the calls; none if a peer has failed twice. Raises RuntimeError if one of ours has failed."""
        for _ in range(TRIES):
            try:
                return self.pairs[name].measure(question)
            except RuntimeError as error:
                if name in OURS:
                    raise
                self.failures.append(f"{name}, {question['op']} of {question['size']} bytes: {error}")
        return []

    def close(self) -> None:
        """End all programs."""
        for pair in self.pairs.values():
            pair.close()


def cells(contenders: Contenders, rounds: int, seconds: float) -> Iterator[Row]:
    """Per cell, over TCP and on one host: median and 99th percentile of a call in microseconds."""
    for name, (size, pieces, count) in SHAPES.items():
        for op in ("write", "read"):
            question = {"op": op, "size": size, "pieces": pieces, "count": count, "seconds": seconds}
            took = in_turns(contenders.pairs, rounds, partial(contenders.measure, question))
            peers = {"upstream": took["upstream"]} if "upstream" in took else {}
            yield from rows(f"{op} {name}, {TCP}", took[TCP], peers, {})
            yield from rows(f"{op} {name}, {ONE_HOST}", took[ONE_HOST], peers, {"memcpy": took["memcpy"]})

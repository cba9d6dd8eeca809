"""All contenders of one run, cell by cell: equal rounds for each, and a new process after a failure.

A cell is (operation, bytes of a block, blocks per call). Contenders take turns in every cell of every round. A cell
counts only if all of its rounds were measured; the result lists all failures, including those that a retry fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.common.peer_python import FLAG
from lab.bench.transfer.pairs import Arenas, Missing, Pair
from lab.bench.transfer.verdict import size_text

TRIES = 3
"""Maximum tries of one cell in one round; each failure restarts the contender's processes."""

Case = tuple[str, int, int]
"""Operation (read or write), bytes of a block, blocks per call."""

Key = tuple[str, str, int, int]
"""Contender, then its Case."""


class Contenders:
    """The contenders that run here. `missing`: the reasons why others do not. `failures`: all failures, in order."""

    def __init__(self, pythons: Mapping[str, Path | None], arenas: Arenas, congestion: str, stack: ExitStack) -> None:
        """`pythons`: contender -> its interpreter, or None. Processes end with `stack`."""
        self.missing: dict[str, str] = {}
        self.failures: list[str] = []
        self._pythons, self._arenas, self._congestion = pythons, arenas, congestion
        self._pairs: dict[str, Pair] = {}
        self._no_starts: dict[str, int] = {}  # starts that failed in a row
        stack.callback(self._close)
        for name in pythons:
            self._start(name)

    @property
    def pairs(self) -> list[Pair]:
        return list(self._pairs.values())

    def _start(self, name: str) -> bool:
        python = self._pythons[name]
        try:
            if python is None:
                raise Missing(f"name an interpreter that has it with {FLAG}")
            self._pairs[name] = Pair(name, str(python), self._arenas, self._congestion)
            self.missing.pop(name, None)
        except Missing as error:
            self.missing[name] = str(error)
            print(f"missing: {name}: {error}", file=sys.stderr)
        return name in self._pairs

    def _start_again(self, name: str) -> bool:
        """Not after TRIES failures in a row: each may take a minute."""
        if self._no_starts.get(name, 0) >= TRIES:
            return False
        if self._start(name):
            self._no_starts[name] = 0
            return True
        self._no_starts[name] = self._no_starts.get(name, 0) + 1
        self.failures.append(f"{name}: it did not start again: {self.missing[name]}")
        return False

    def _close(self) -> None:
        for pair in self._pairs.values():
            pair.close()

    def measure(
        self, grid: Sequence[Case], rounds: int, seconds: float, on_cell: Callable[[str], None]
    ) -> dict[Key, dict[str, Any]]:
        """Medians over `rounds` rounds of at most `seconds` each; omits cells that lack a round."""
        runs: dict[Key, list[dict[str, Any]]] = {}
        names = list(self._pairs)
        for number, (round_, (op, size, batch)) in enumerate(product(range(rounds), grid), 1):
            on_cell(f"{number}/{rounds * len(grid)} {op} {size_text(size)} x{batch}")
            turn = (number + round_) % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                result = self._tried(name, (op, size, batch), seconds)
                if result is not None:
                    runs.setdefault((name, op, size, batch), []).append(result)
        return {key: _median(results) for key, results in runs.items() if len(results) == rounds}

    def _tried(self, name: str, case: Case, seconds: float) -> dict[str, Any] | None:
        """The cell, None after TRIES failures."""
        for _ in range(TRIES):
            if name not in self._pairs and not self._start_again(name):
                continue
            try:
                return dict(self._pairs[name].cell(*case, seconds))
            except (Missing, OSError) as error:
                op, size, batch = case
                self.failures.append(f"{name}, {op} {size_text(size)} x{batch}: {error}")
                print(f"\nstarting again: {self.failures[-1]}", file=sys.stderr)
                self._pairs.pop(name).close()
        return None


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number; calls are summed, threads are the maximum of any round. `n_least`: calls of the round
    with the fewest, of which its percentiles are."""
    speeds = [result["gbs"] for result in results]
    middle = {name: median(result[name] for result in results) for name in results[0] if name not in ("n", "threads")}
    return middle | {
        "n": sum(result["n"] for result in results),
        "n_least": min(result["n"] for result in results),
        "threads": max(result["threads"] for result in results),
        "rounds": len(results),
        "gbs_min": min(speeds),
        "gbs_max": max(speeds),
    }

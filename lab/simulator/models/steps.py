"""Steps of a real engine, written by a node with --record-steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from lab.simulator.models.step_models import Chunk


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """`seconds`: from the end of the previous step, or from its own start if the engine was idle: the cost of a step
    including the time between two steps."""

    begin: float
    seconds: float
    chunks: tuple[Chunk, ...]
    batch: int  # requests that decode
    context: int  # tokens they attend to, together
    shared: float = 0.0  # share of its time in which another node of the machine computed


def together(by_node: Sequence[Sequence[RecordedStep]]) -> list[RecordedStep]:
    """The steps of all nodes of one machine, sorted by time, with the shares in which other nodes computed."""
    found = []
    for own in by_node:
        others = sorted((s.begin, s.begin + s.seconds) for steps in by_node if steps is not own for s in steps)
        busy = _Busy(others)
        found += [replace(s, shared=busy.seconds(s.begin, s.begin + s.seconds) / s.seconds) for s in own]
    return sorted(found, key=lambda step: step.begin)


class _Busy:
    """How much of a time span a union of intervals covers."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        """intervals: (begin, end) in seconds, sorted by begin."""
        merged: list[list[float]] = []
        for begin, end in intervals:
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        bounds: npt.NDArray[np.float64] = np.array(merged).reshape(-1, 2)
        self._begins, self._lengths = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
        self._before = np.concatenate([[0.0], np.cumsum(self._lengths)])

    def seconds(self, begin: float, end: float) -> float:
        return self._until(end) - self._until(begin)

    def _until(self, at: float) -> float:
        number = int(np.searchsorted(self._begins, at)) - 1
        if number < 0:
            return 0.0
        return float(self._before[number] + min(at - self._begins[number], self._lengths[number]))


def read_steps(path: Path) -> list[RecordedStep]:
    """The steps in order, without those that waited for a prefix. Raises OSError, ValueError naming the line."""
    with path.open("rb") as file:
        lines = file.read().splitlines()
    try:
        return steps(map(orjson.loads, lines))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by --record-steps: {error!r}") from error


def steps(lines: Iterable[dict[str, Any]]) -> list[RecordedStep]:
    made, ended = [], 0.0
    for line in lines:
        begin, end = line["begin"], line["end"]
        since = begin if line["idle"] else ended
        ended = end
        if not line["waited"]:
            made.append(_step(since, end - since, line["rows"]))
    return made


def _step(begin: float, seconds: float, rows: Sequence[tuple[int, int]]) -> RecordedStep:
    """A row of one token counts as a decode: a prompt's last token is computed alone only if its cached prefix ends
    there."""
    chunks = tuple((tokens, start) for tokens, start in rows if tokens > 1)
    contexts = [start + 1 for tokens, start in rows if tokens == 1]
    return RecordedStep(begin, seconds, chunks, len(contexts), sum(contexts))

"""Steps of a real engine, as a node with --record-steps wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sim.models import Chunk


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """`seconds` from the end of the step before, or from its own begin where the engine had been idle: what a step
    costs, the time between two of them included."""

    begin: float
    seconds: float
    chunks: tuple[Chunk, ...]
    batch: int  # requests that decode
    context: int  # tokens they attend to, together


def read_steps(path: Path) -> list[RecordedStep]:
    """In their order, without those that waited for a prefix. Raises OSError, ValueError naming the line."""
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
    """A row of one token is a decode: nobody computes a prompt's last token alone but for a prefix that ends there."""
    chunks = tuple((tokens, start) for tokens, start in rows if tokens > 1)
    contexts = [start + 1 for tokens, start in rows if tokens == 1]
    return RecordedStep(begin, seconds, chunks, len(contexts), sum(contexts))

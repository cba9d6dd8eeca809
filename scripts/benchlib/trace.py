"""Mooncake's trace format: reading, and turning rows into requests.

One JSON object per line: timestamp (ms), input_length, output_length (tokens), hash_ids (one per 512-token block;
an id stands for its block and everything before it). Plain .jsonl or compressed .jsonl.xz.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson

from scripts.benchlib.workload import BLOCK, Spec, TokenSource

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows in file order. Raises ValueError naming the line, OSError when the file cannot be read."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(line, f"{path} line {number}")


def _row(line: bytes, where: str) -> TraceRow:
    try:
        data = orjson.loads(line)
        row = TraceRow(data["timestamp"], data["input_length"], data["output_length"], data["hash_ids"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no row of a Mooncake trace: {error!r}") from error
    sizes_fit = all(type(size) is int and size > 0 for size in (row.input_length, row.output_length))
    ids_fit = isinstance(row.hash_ids, list) and all(type(i) is int and i >= 0 for i in row.hash_ids)
    if not sizes_fit or not ids_fit or not isinstance(row.timestamp_ms, int | float):
        raise ValueError(f"{where}: timestamp must be a number, lengths positive integers, hash_ids non-negative ones")
    if len(row.hash_ids) * BLOCK_TOKENS < row.input_length:
        raise ValueError(f"{where}: {len(row.hash_ids)} hash_ids are too few for {row.input_length} tokens")
    return row


def trace_specs(
    rows: Iterable[TraceRow], source: TokenSource, count: int, time_scale: float, length_scale: float
) -> list[Spec]:
    """The first `count` rows as requests.

    time_scale multiplies timestamps (0.5 = twice the rate); length_scale multiplies all lengths and the block, so
    that shared prefixes keep their share of the prompt on a machine too small for the original.
    """
    if not time_scale >= 0 or not 0 < length_scale <= 1:
        raise ValueError("--time-scale must not be negative, --length-scale must be in (0, 1]")
    block = max(1, round(BLOCK_TOKENS * length_scale))
    specs: list[Spec] = []
    for row in islice(rows, count):
        length = max(1, round(row.input_length * length_scale))
        tokens: list[int] = []
        for hash_id in row.hash_ids:
            if len(tokens) >= length:
                break
            tokens += source.tokens(block, BLOCK, hash_id)
        at_s = row.timestamp_ms / 1000 * time_scale
        specs.append(Spec(tokens[:length], max(1, round(row.output_length * length_scale)), at_s))
    return sorted(specs, key=lambda spec: spec.at_s)

"""Mooncake's trace format, read and written.

One JSON object per line: timestamp (ms), input_length, output_length (tokens), hash_ids (one per 512-token block;
an id stands for its block and everything before it). Plain .jsonl or compressed .jsonl.xz.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import orjson

from sched.classes import CLASSES

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    service_class: str = "standard"  # an extension; files without it have one class
    site: int = 0  # an extension: where the request arrives
    session: int = -1  # an extension: the conversation or agent of which it is a turn; -1 = none


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows in file order. Raises ValueError naming the line, or when a compressed file is damaged or ends too early;
    OSError when the file cannot be read."""
    opener = lzma.open if path.suffix == ".xz" else open
    number = 0
    with opener(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(line, f"{path} line {number}")
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path} is damaged after line {number}: {error}") from error


def _row(line: bytes, where: str) -> TraceRow:
    try:
        data = orjson.loads(line)
        service_class = data.get("service_class", "standard")
        site, session = data.get("site", 0), data.get("session", -1)
        lengths = data["input_length"], data["output_length"]
        row = TraceRow(data["timestamp"], *lengths, data["hash_ids"], service_class, site, session)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no row of a Mooncake trace: {error!r}") from error
    sizes_fit = all(type(size) is int and size > 0 for size in (row.input_length, row.output_length))
    ids_fit = isinstance(row.hash_ids, list) and all(type(i) is int and i >= 0 for i in row.hash_ids)
    if not sizes_fit or not ids_fit or type(row.timestamp_ms) not in (int, float):
        raise ValueError(f"{where}: timestamp must be a number, lengths positive integers, hash_ids non-negative ones")
    if type(site) is not int or site < 0:
        raise ValueError(f"{where}: site must be a non-negative integer")
    if type(session) is not int or session < -1:
        raise ValueError(f"{where}: session must be an integer from -1 on")
    if not isinstance(service_class, str) or service_class not in CLASSES:
        raise ValueError(f"{where}: service_class must be one of {', '.join(CLASSES)}")
    if len(row.hash_ids) * BLOCK_TOKENS < row.input_length:
        raise ValueError(f"{where}: {len(row.hash_ids)} hash_ids are too few for {row.input_length} tokens")
    return row


def write_trace(path: Path, rows: Iterable[TraceRow]) -> int:
    """Write rows, compressed if the path ends with .xz; returns their number."""
    opener = lzma.open if path.suffix == ".xz" else open
    count = 0
    with opener(path, "wb") as file:
        for row in rows:
            line = {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": row.hash_ids,
            } | ({} if row.service_class == "standard" else {"service_class": row.service_class})
            line |= {"site": row.site} if row.site else {}
            line |= {"session": row.session} if row.session >= 0 else {}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def jittered(rows: Sequence[TraceRow], spread_s: float, seed: int) -> list[TraceRow]:
    """Sorted by time, each moved by up to `spread_s`: released timestamps have steps of three seconds, and people do
    not ask in bursts every three seconds."""
    rng = Random(seed)
    moved = [replace(row, timestamp_ms=row.timestamp_ms + 1000 * spread_s * rng.random()) for row in rows]
    return sorted(moved, key=lambda row: row.timestamp_ms)

"""The one result format of all benchmarks, as JSON and as a table with ratios.

{"config": {..., "machine": {...}}, "commit": "...",
 "rows": [{"case", "metric", "unit", "ours", "peers", "limits", "note"}]}

A program may add more fields to a row.

A peer that could not be measured has the value null and is printed as 'missing', never as an invented number. `machine`
has the features of the CPU, and how busy the machine was before and during the run (see `lab.bench.common.machine`).
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from lab.bench.common.machine import busy_note, machine
from lab.bench.common.portable import portable
from lab.flag_types import file_to_write

Value = float | None
UNITS = {"requests_s": "1/s", "tokens_s": "1/s", "bytes_s": "bytes/s", "_s": "s", "_ms": "ms", "bytes": "bytes"}
"""End of a figure's name -> its unit; the first match counts."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number with its peers' numbers and its limits (a ceiling, an offered load)."""

    case: str
    metric: str
    unit: str
    ours: Value
    peers: dict[str, Value] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    note: str = ""


def exceeded(row: Row) -> list[str]:
    """The limits of a rate that are below it, except goals. Such a limit is invalid: it was measured wrongly, or is
    none."""
    if row.metric != "rate" or row.ours is None:
        return []
    return [name for name, limit in row.limits.items() if row.ours > limit and not name.startswith("goal")]


def marked(row: Row) -> Row:
    """The same row; if it exceeds limits, its note names them."""
    wrong = [f"invalid limit {name}: a rate exceeds it" for name in exceeded(row)]
    return replace(row, note="; ".join([row.note, *wrong] if row.note else wrong)) if wrong else row


def add_result_flags(parser: ArgumentParser) -> None:
    """--quick and --json, the same in every benchmark."""
    parser.add_argument("--quick", action="store_true", help="a small run of under a minute")
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="also write the results to PATH as JSON")


def median_of(name: str, scale: float, measured: Sequence[object]) -> float:
    """The median of a field, times `scale`."""
    return float(scale * median(getattr(one, name) for one in measured))


def quicken(args: Namespace, **most: Any) -> Namespace:
    """The same flags; with --quick, numbers in `most` are upper bounds, and other values replace the flags."""
    for name, value in most.items() if args.quick else ():
        setattr(args, name, value if isinstance(value, str) else min(getattr(args, name), value))
    return args


def report(config: Mapping[str, Any], rows: Sequence[Row], path: Path | None, out: TextIO | None = None) -> None:
    """Print the table; write the same as JSON if there is a path. Rows that exceed their limits are marked."""
    stream = sys.stdout if out is None else out
    rows = [marked(row) for row in rows]
    print(table(rows), file=stream)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        print(f"note: {note}", file=stream)
    if path is not None:
        write_result(config, rows, path, stream)


def write_result(config: Mapping[str, Any], rows: Sequence[Any], path: Path, out: TextIO | None = None) -> None:
    """Write the JSON file only. A row is a dataclass or a mapping with at least the first four fields of Row. Raises
    ValueError for a row that lacks one of them."""
    import orjson  # here: a GPU machine without it can measure, but writes no file

    here = machine()
    if not here["quiet"]:
        print(f"note: {busy_note(here)}", file=sys.stdout if out is None else out)
    made = portable([_complete(row) for row in rows])
    data = {"config": portable(config) | {"machine": here}, "commit": commit(), "rows": made}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    print(f"written: {path}", file=sys.stdout if out is None else out)


def numbers(case: str, values: Mapping[str, Any]) -> list[Row]:
    """One row per number of nested `values`: the metric is its path, like "ttft_s p50", and the unit follows from
    that."""
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += [replace(row, metric=f"{name} {row.metric}") for row in numbers(case, value)]
        elif isinstance(value, bool | int | float):
            found.append(Row(case, str(name), "", float(value)))
    return [replace(row, unit=_unit(row.metric)) for row in found]


def _unit(metric: str) -> str:
    fitting = (unit for end, unit in UNITS.items() for word in metric.split() if word.endswith(end))
    return next(fitting, "")


def _complete(row: Any) -> dict[str, Any]:
    given = asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)
    if missing := [name for name in ("case", "metric", "unit", "ours") if name not in given]:
        raise ValueError(f"a row without {missing[0]}: {given}")
    return {"peers": {}, "limits": {}, "note": ""} | given


def table(rows: Sequence[Row]) -> str:
    """Columns: case, metric, unit, ours, then each peer and limit with the ratio ours / theirs. The ratio to a limit
    that a rate exceeds is followed by 'invalid'."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    limits = list(dict.fromkeys(name for row in rows for name in row.limits))
    head = ["case", "metric", "unit", "ours"]
    for name in peers + limits:
        head += [name, f"ours/{name}"]
    lines = [head]
    for row in rows:
        line = [row.case, row.metric, row.unit, _number(row.ours)]
        for name in peers:
            line += [_number(row.peers[name]) if name in row.peers else "", _ratio(row.ours, row.peers.get(name))]
        for name in limits:
            ratio = _ratio(row.ours, row.limits.get(name))
            line += [_number(row.limits[name]) if name in row.limits else "", ratio]
            if name in exceeded(row):
                line[-1] += " invalid"
        lines.append(line)
    return columns(lines, range(3))


def columns(lines: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Words in aligned columns: those of `left` begin below each other, the others end below each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = enumerate(zip(line, widths, strict=True))
        shown.append("  ".join(word.ljust(w) if i in left else word.rjust(w) for i, (word, w) in cells).rstrip())
    return "\n".join(shown)


def commit() -> str:
    """The checkout's commit, with '-dirty' when files differ from it; 'unknown' outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def _number(value: Value) -> str:
    if value is None:
        return "missing"
    if value and abs(value) < 1:
        return f"{value:.4g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _ratio(ours: Value, theirs: Value) -> str:
    return f"{ours / theirs:.2f}x" if ours is not None and theirs else ""

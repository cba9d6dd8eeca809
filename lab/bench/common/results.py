"""The one result format of all benchmarks, as JSON and as a table with ratios.

{"config": {..., "machine": {...}}, "commit": "...",
 "rows": [{"case", "metric", "unit", "ours", "peers", "limits", "note"}]}

A program may add more fields to a row.

A peer that could not be measured has the value null and is printed as 'missing', never as an invented number. `machine`
has the features of the CPU, and how busy the machine was before and during the run (see `lab.bench.common.machine`).
`commit` is that of the moment when the flags were made; if the checkout has another one at the end, no commit is what
was measured, and it ends with '-dirty'.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from lab.bench.common.machine import busy_note, machine
from lab.bench.common.portable import portable
from lab.flag_types import file_to_write

Value = float | None
UNITS = {"requests_s": "1/s", "tokens_s": "1/s", "bytes_s": "bytes/s", "_s": "s", "_ms": "ms", "bytes": "bytes"}
"""End of a figure's name -> its unit; the first match counts."""

TIMES = ("s", "ms", "us")
LEAST_TIMES = ("floor", "read")
"""Limits of times that no time can be below."""
COPIES = ("memcpy", "memcpy-2")
"""Limits of every rate in GB/s of what does not shrink its bytes."""
TAIL = re.compile(r"(?:^|[ ,])p(\d\d)(?!\d)")
"""A percentile in the name of a metric."""

_begun: list[str] = []
"""The commit at the beginning of this program, once its flags have been made."""


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
    samples: dict[str, int] = field(default_factory=dict)  # of a percentile: contender -> number of its values


def exceeded(row: Row) -> list[str]:
    """The limits that ours is beyond, except goals: a rate above one, or a time below the least time. Such a limit is
    invalid: it was measured wrongly, or is none."""
    if row.ours is None:
        return []
    ours, time = row.ours, row.unit in TIMES

    def beyond(name: str, limit: float) -> bool:
        if time:
            return name in LEAST_TIMES and ours < limit
        bounded = row.metric == "rate" or (row.unit == "GB/s" and name in COPIES)
        return bounded and ours > limit and not name.startswith("goal")

    return [name for name, limit in row.limits.items() if beyond(name, limit)]


def thin(row: Row) -> str:
    """What to say of a percentile of so few samples that it is their largest value; "" of any other row."""
    found = TAIL.search(row.metric)
    if found is None or not row.samples or row.ours is None:
        return ""
    enough = 100 / (100 - int(found[1]))
    few = min(row.samples.values()) < enough
    return f"p{found[1]} of fewer than {enough:.0f} samples: their largest, or close to it" if few else ""


def marked(row: Row) -> Row:
    """The same row; if it exceeds limits, or is a percentile of few samples, its note says so."""
    what = "a time is below it" if row.unit in TIMES else "a rate exceeds it"
    said = [f"invalid limit {name}: {what}" for name in exceeded(row)]
    said = [one for one in [*said, thin(row)] if one and one not in row.note]
    return replace(row, note="; ".join([row.note, *said] if row.note else said)) if said else row


def add_result_flags(parser: ArgumentParser) -> None:
    """--quick and --json, the same in every benchmark. A program begins here: its result names the commit of now."""
    if not _begun:
        _begun.append(commit())
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
    """Write the JSON file only. A row is a dataclass or a mapping with at least the first four fields of Row. Rows that
    exceed their limits are marked. Raises ValueError for a row that lacks one of the fields."""
    import orjson  # here: a GPU machine without it can measure, but writes no file

    here = machine()
    if not here["quiet"]:
        print(f"note: {busy_note(here)}", file=sys.stdout if out is None else out)
    made = portable([_complete(row) for row in rows])
    data = {"config": portable(config) | {"machine": here}, "commit": measured_commit(path), "rows": made}
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
    whole = {"peers": {}, "limits": {}, "note": ""} | given
    known = {one.name for one in fields(Row)}
    whole["note"] = marked(Row(**{name: value for name, value in whole.items() if name in known})).note
    return {name: value for name, value in whole.items() if value or name != "samples"}


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


def commit(without: Path | None = None, here: Path = Path(__file__).parent) -> str:
    """The checkout's commit, with '-dirty' when files other than `without` differ from it; 'unknown' outside a
    checkout."""
    try:
        head = _git(here, "rev-parse", "HEAD").decode().strip()
        top = Path(_git(here, "rev-parse", "--show-toplevel").decode().strip()).resolve()
        own = without is not None and without.resolve().is_relative_to(top)
        hidden = [f":(exclude,top,literal){without.resolve().relative_to(top)}"] if own and without is not None else []
        status = _git(here, "status", "--porcelain", "--untracked-files=all", "--", ":/", *hidden)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if status.strip() else "")


def measured_commit(result: Path | None = None) -> str:
    """The commit that this program has measured: that of its beginning, '-dirty' if the checkout changed meanwhile. A
    `result` that has been written before is no change."""
    now = commit(result)
    begun = _begun[0] if _begun else now
    return now if now == begun else begun.removesuffix("-dirty") + "-dirty"


def changes(here: Path = Path(__file__).parent) -> str:
    """A name of how the files differ from the checkout's commit: equal for equal files, "" without a difference."""
    try:
        top = Path(_git(here, "rev-parse", "--show-toplevel").decode().strip())
        changed = _git(top, "diff", "HEAD", "--binary")
        others = _git(top, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    found = hashlib.sha256(changed)
    for name in others:
        path = top / name.decode(errors="surrogateescape")
        found.update(name + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return found.hexdigest() if changed or others else ""


def _git(folder: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True).stdout


def _number(value: Value) -> str:
    if value is None:
        return "missing"
    if value and abs(value) < 1:
        return f"{value:.4g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _ratio(ours: Value, theirs: Value) -> str:
    return f"{ours / theirs:.2f}x" if ours is not None and theirs else ""

"""Tables of README.md and docs/, made from the result files: one table is one run of one commit.

A page marks the place of a table:

    <!-- figure: NAME -->
    <!-- end -->

and scripts/gendocs.py fills it in from the newest lab/results/DATE-RESULT.json. No text between the marks is written by
hand, so no table can mix runs. Each table names its command, commit, day and CPU, and says if the machine was busy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.common.peer_python import FLAG

RESULTS = Path(__file__).resolve().parents[1] / "results"
MARK = re.compile(r"(<!-- figure: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]
"""A row of lab.bench.common.results."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result file."""

    path: Path
    config: Mapping[str, Any]
    commit: str
    rows: Sequence[Row]

    @classmethod
    def newest(cls, name: str, folder: Path = RESULTS) -> Result:
        """DATE-`name`.json of the latest date. Raises LookupError."""
        found = sorted(path for path in folder.glob("*.json") if re.fullmatch(r"\d{4}-\d\d-\d\d-" + name, path.stem))
        if not found:
            raise LookupError(f"no result {name!r} in {folder.name}/")
        data = json.loads(found[-1].read_bytes())
        return cls(found[-1], data["config"], data["commit"], data["rows"])

    @property
    def machine(self) -> Mapping[str, Any]:
        return dict(self.config.get("machine", {}))

    def row(self, case: str, metric: str) -> Row:
        """Raises LookupError."""
        for row in self.rows:
            if row["case"] == case and row["metric"] == metric:
                return row
        raise LookupError(f"{self.path.name} has no row {case!r}, {metric!r}")

    def cases(self, pattern: str) -> list[str]:
        """The matching cases, in their order."""
        return list(dict.fromkeys(row["case"] for row in self.rows if re.fullmatch(pattern, row["case"])))

    def ratio(self, case: str, metric: str, other: str) -> float | None:
        """Our value / that of a peer or a limit; None if one of the two is missing."""
        row = self.row(case, metric)
        theirs = {**row.get("limits", {}), **row.get("peers", {})}.get(other)
        return row["ours"] / theirs if theirs and row["ours"] is not None else None


@dataclass(frozen=True, slots=True)
class Figure:
    """A table. If `compared_with` is empty, it has one line per case and one column per metric. Otherwise it has one
    line per case and metric, and one column with the ratio to each of `compared_with` (peers and limits)."""

    name: str
    metrics: Mapping[str, str]  # name in the file, or "name -> limit" -> name on the page
    result: str = ""  # "" = `name`
    command: str = ""  # "" = `ran(result)`
    cases: str = ".*"  # pattern
    compared_with: Sequence[str] = ()
    timed: bool = True  # False: counts or virtual time, for which the CPU does not matter
    without: str = "missing"  # the cell of a row without a value

    def render(self, folder: Path = RESULTS) -> str:
        name = self.result or self.name
        result = Result.newest(name, folder)
        command = self.command or ran(name, result)
        if not self._has_rows(result):
            return f"The newest result of `{command}` does not have these rows."
        lines = self._compared(result) if self.compared_with else self._columns(result)
        return "\n".join([*lines, "", caption(result, command, self.timed)])

    def _has_rows(self, result: Result) -> bool:
        cases, metrics = set(result.cases(self.cases)), {name.partition(" -> ")[0] for name in self.metrics}
        return any(row["case"] in cases and row["metric"] in metrics for row in result.rows)

    def _columns(self, result: Result) -> list[str]:
        lines = ["| | " + " | ".join(self.metrics.values()) + " |", "|---" * (len(self.metrics) + 1) + "|"]
        for case in result.cases(self.cases):
            known = {row["metric"]: row for row in result.rows if row["case"] == case}
            cells = [self._cell(known, name) for name in self.metrics]
            if any(cells):
                lines.append(f"| {case} | " + " | ".join(cells) + " |")
        return lines

    def _cell(self, known: Mapping[str, Row], name: str) -> str:
        """The value of a metric, or its limit; "" for a metric that the case does not have."""
        metric, _, limit = name.partition(" -> ")
        if metric not in known:
            return ""
        return number(known[metric]["limits"][limit]) if limit else number(known[metric]["ours"], self.without)

    def _compared(self, result: Result) -> list[str]:
        heads = [head for other in self.compared_with for head in (other, "ratio")]
        lines = ["| | ours | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
        for case in result.cases(self.cases):
            for metric, label in self.metrics.items():
                row = next((row for row in result.rows if row["case"] == case and row["metric"] == metric), None)
                if row is None:
                    continue
                others = {**row.get("limits", {}), **row.get("peers", {})}
                unit = "" if row["unit"] in label or not row["unit"] else f", {row['unit']}"
                cells = [f"{case}: {label}{unit}" if label else case, number(row["ours"])]
                for other in self.compared_with:
                    ratio = result.ratio(case, metric, other) if other in others else None
                    cells += [number(others[other]) if other in others else "", "" if ratio is None else f"{ratio:.2f}"]
                lines.append("| " + " | ".join(cells) + " |")
        return lines


def number(value: float | None, without: str = "missing") -> str:
    """A number in a table: three significant digits, or all digits of a whole number; `without` for None."""
    if value is None:
        return without
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ran(name: str, result: Result) -> str:
    """The command of the run, with the flags that its file names; no --json, and interpreters as VENV/bin/python."""
    words: list[str] = []
    given = iter(result.config.get("argv", ()))
    for word in given:
        flag, joint, value = word.partition("=")
        if flag not in ("--json", FLAG):
            words.append(word)
            continue
        value = value if joint else next(given)
        if flag == FLAG:
            peer, named, _ = value.rpartition("=")
            words += [flag, f"{peer}{named}VENV/bin/python"]
    return " ".join([f"scripts/bench.py {name}", *words])


def stamp(result: Result) -> str:
    """Day, commit, and whether the machine was busy."""
    busy = "" if result.machine.get("quiet", True) else ", **machine busy**"
    return f"[{result.path.stem[:10]}](lab/results/{result.path.name}), `{result.commit[:7]}`{busy}"


def caption(result: Result, command: str, timed: bool = True) -> str:
    """The origin of a table."""
    here = result.machine
    changed = " with uncommitted changes" if result.commit.endswith("-dirty") else ""
    parts = [f"`{command}`", f"`lab/results/{result.path.name}`", f"commit `{result.commit[:7]}`{changed}"]
    if not timed:
        parts += [] if here.get("quiet", True) else ["**machine busy**"]
    else:
        features = ", ".join(here.get("cpu_features", ()))
        cpu = f"{here['cpu']} ({features})" if "cpu" in here else "a CPU with AMX (the file does not name it)"
        parts.append(f"{here.get('cores', 2)} cores of {cpu}")
        if "load_before" in here:
            load = f"load before {here['load_before']:.2f}"
            load += f", others {here['others_share']:.0%} of the cores" if "others_share" in here else ""
            parts.append(load + ("" if here["quiet"] else " (**machine busy**)"))
    return "; ".join(parts) + "."


def filled(text: str, figures: Mapping[str, Callable[[], str]]) -> str:
    """The page with every marked table made from its result. Raises KeyError for a mark that names no figure."""
    return MARK.sub(lambda found: f"{found[1]}{figures[found[2]]()}\n{found[3]}", text)

"""Sentences and a table about the rivals, from the values and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.ablations.common.evidence import Values, change, points, sign, told
from lab.ablations.rivals.published import DEFAULT, PLAIN, RIVALS

GOOD = "goodput"
COST = "cost per million good tokens"


def label(system: str, load: str) -> str:
    """The label of a case."""
    return f"{system}, {load}"


def against(values: Values, load: str, metric: str = GOOD) -> dict[int, list[str]]:
    """1: the rivals above the default on that load, as far as the intervals tell; -1: those below; 0: the others."""
    found: dict[int, list[str]] = {1: [], 0: [], -1: []}
    for name in RIVALS:
        found[sign(values, metric, label(name, load), label(DEFAULT, load))].append(name)
    return found


def one_load(values: Values, load: str) -> str:
    """Where a rival beats the default on that load, and where not."""
    ours = values[label(DEFAULT, load)][GOOD]
    said = f"On {load} the default keeps both objectives for {told(ours, '.1%')} of the requests"
    if math.isnan(ours.half):
        return f"{said} (one seed: no interval, so no difference is shown)."
    found = against(values, load)
    better = [f"{name} ({_points(values, name, load)})" for name in found[1]]
    worse = [f"{name} ({_points(values, name, load)})" for name in found[-1]]
    cheaper = against(values, load, COST)[-1]
    plain = [f"{name} {points(values, GOOD, label(name, load), label(DEFAULT, load))}" for name in PLAIN]
    return (
        f"{said}. A rival beats it: {_list(better)}. It beats: {_list(worse)}. "
        f"Not shown to differ: {_list(found[0])}. Cheaper per good token: {_list(cheaper)}. "
        f"Plain placements against it: {', '.join(plain)}."
    )


def _points(values: Values, name: str, load: str) -> str:
    found = change(values, GOOD, label(name, load), label(DEFAULT, load))
    return f"{100 * found.mean:+.1f} ±{100 * found.half:.1f} points"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def ratio(values: Values, metric: str, case: str, baseline: str) -> str:
    """The case over the baseline; "not shown" if the intervals do not separate them. For times, a ratio below 1 is the
    better one."""
    below, above = values[baseline][metric].mean, values[case][metric].mean
    if not below or math.isnan(below) or math.isnan(above):
        return "-"
    return f"{above / below:.2f}x" if sign(values, metric, case, baseline) else "not shown"


def side_by_side(values: Values, loads: Sequence[str]) -> str:
    """A Markdown table: each rival, its published figure, and ours on every load over the same kind of baseline; then
    the plain baselines over the default."""
    head = ["rival", "source", "published", "ours", *loads]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, rival in RIVALS.items():
        for over in rival.over:
            row = [name, rival.source, rival.published, f"{rival.metric} over {over}"]
            row += [ratio(values, rival.metric, label(name, load), label(over, load)) for load in loads]
            lines.append("| " + " | ".join(row) + " |")
    for name in PLAIN:
        row = [name, "a plain baseline", "", f"{GOOD} over {DEFAULT}"]
        row += [ratio(values, GOOD, label(name, load), label(DEFAULT, load)) for load in loads]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)

"""An outcome as a Markdown section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.ablations.common.ablation import Goal, Outcome
from lab.simulator.config import SimConfig


def section(outcome: Outcome[Any], plot: str | None = None) -> str:
    """Question, definition, configuration, table with the paper's values, plot, reading."""
    ablation = outcome.ablation
    names = list(ablation.metrics)
    head = ["case", *names]
    if ablation.paper:
        head.insert(2, f"paper: {names[0]}")
    asked = f"{ablation.definition} Requests: {requests(outcome)}."
    lines = [f"## {ablation.name}: {ablation.question}", "", asked, ""]
    if set_to := configuration([case.settings() for case in outcome.cases]):
        lines += [f"Configuration: {set_to}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in outcome.cases:
        row = [case.label, *(str(outcome.values[case.label][name]) for name in names)]
        if ablation.paper:
            known = ablation.paper.get(case.label)
            row.insert(2, "" if known is None else f"{known:g}")
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", f"Paper: {ablation.paper_source or 'no figure of this'}."]
    if plot is not None:
        lines += ["", f"![{ablation.name}]({plot})"]
    lines += ["", ablation.reading(outcome.values), ""]
    if ablation.goals is not None:
        lines += [goal_table(ablation.goals(outcome.values)), ""]
    return "\n".join(lines)


def requests(outcome: Outcome[Any]) -> str:
    """The origin of the requests, and their number per case."""
    counts = {found["requests"] for runs in outcome.raw.values() for found in runs if "requests" in found}
    if not counts:
        return outcome.source
    least, most = min(counts), max(counts)
    return f"{outcome.source}; {most:,} per case" if least == most else f"{outcome.source}; {least:,}-{most:,} per case"


def configuration(settings: Sequence[Mapping[str, object]]) -> str:
    """The settings common to all cases that differ from the simulator's defaults; then those that differ between
    cases."""
    default = SimConfig().as_dict() | {"speed": 1.0}
    names = list(dict.fromkeys(name for one in settings for name in one))
    found = {name: list(dict.fromkeys(one[name] for one in settings if name in one)) for name in names}
    common = [f"{name} {_said(v[0])}" for name, v in found.items() if len(v) == 1 and default.get(name) != v[0]]
    varied = [f"{name} {' or '.join(map(_said, values))}" for name, values in found.items() if len(values) > 1]
    return "; ".join(common + varied)


def _said(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def goal_table(goals: Sequence[Goal]) -> str:
    """The goal and the measured value. "Open": its interval contains the target."""
    words = {True: "met", False: "NOT met", None: "open"}
    rows = [f"| {goal.text} | {goal.wanted} | {goal.ours} | {words[goal.met]} |" for goal in goals]
    return "\n".join(["| goal | wanted | ours | |", "|---|---|---|---|", *rows])

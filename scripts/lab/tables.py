"""An outcome as a Markdown section."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.lab.ablation import Goal, Outcome


def section(outcome: Outcome, plot: str | None = None) -> str:
    """Question, definition, table with the paper's values, plot, reading."""
    ablation = outcome.ablation
    names = list(ablation.metrics)
    head = ["case", *names]
    if ablation.paper:
        head.insert(2, f"paper: {names[0]}")
    lines = [f"## {ablation.name}: {ablation.question}", "", f"{ablation.definition} Requests: {outcome.source}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in outcome.cases:
        row = [case.label, *(str(outcome.values[case.label][name]) for name in names)]
        if ablation.paper:
            known = ablation.paper.get(case.label)
            row.insert(2, "" if known is None else f"{known:g}")
        lines.append("| " + " | ".join(row) + " |")
    if ablation.paper_source:
        lines += ["", f"Paper: {ablation.paper_source}."]
    if plot is not None:
        lines += ["", f"![{ablation.name}]({plot})"]
    lines += ["", ablation.reading(outcome.values), ""]
    if ablation.goals is not None:
        lines += [goal_table(ablation.goals(outcome.values)), ""]
    return "\n".join(lines)


def goal_table(goals: Sequence[Goal]) -> str:
    """What was to be reached, beside what was."""
    rows = [f"| {goal.text} | {goal.wanted} | {goal.ours} | {'met' if goal.met else 'NOT met'} |" for goal in goals]
    return "\n".join(["| goal | wanted | ours | |", "|---|---|---|---|", *rows])

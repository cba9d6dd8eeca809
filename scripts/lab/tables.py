"""An outcome as a Markdown section."""

from __future__ import annotations

from scripts.lab.ablation import Outcome


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
    return "\n".join([*lines, "", ablation.reading(outcome.values), ""])

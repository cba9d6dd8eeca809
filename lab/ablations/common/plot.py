"""An outcome as SVG or PNG: curves if cases have an x, otherwise bars, together with the paper's values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lab.ablations.common.ablation import Outcome

LOG_AXIS_RATIO = 10.0
"""A curve gets a logarithmic axis if its largest x is at least this many times the smallest."""


MOST_SLANTED = 20
"""Labels of more bars than this stand upright."""


def draw(outcome: Outcome[Any], path: Path) -> None:
    """Plot the first metric. Raises ImportError if matplotlib is missing (pip install -e .[lab])."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mooncake"  # the same outcome gives the same bytes
    from matplotlib import pyplot as plt

    ablation = outcome.ablation
    name = next(iter(ablation.metrics))
    curves = {case.series for case in outcome.cases if case.x is not None}
    width = 7.2 if curves else max(7.2, 0.25 * len(outcome.cases))
    figure, axes = plt.subplots(figsize=(width, 4.2), layout="constrained")
    places = sorted({case.x for case in outcome.cases if case.x is not None})
    for series in sorted(curves):
        points = [case for case in outcome.cases if case.series == series and case.x is not None]
        values = [outcome.values[case.label][name] for case in points]
        bars = [0.0 if math.isnan(value.half) else value.half for value in values]
        axes.errorbar(
            [case.x or 0.0 for case in points], [v.mean for v in values], bars, marker="o", capsize=3, label=series
        )
        paper = [(case.x, ablation.paper[case.label]) for case in points if case.label in ablation.paper]
        if paper:
            axes.plot(*zip(*paper, strict=True), "s--", color="gray", label=f"paper ({ablation.paper_source})")
    flat = [case for case in outcome.cases if case.x is None]
    if curves:
        for case in flat:
            axes.axhline(outcome.values[case.label][name].mean, linestyle=":", label=case.label, color="black")
        axes.legend()
        axes.set_xlabel(ablation.x_name)
        if max(places) > LOG_AXIS_RATIO * min(places) > 0:
            axes.set_xscale("log")
            axes.set_xticks(places, [f"{x:g}" for x in places], minor=False)
    else:
        _bars(axes, outcome, [case.label for case in flat], name)
    axes.set_ylabel(name)
    axes.set_title(ablation.question, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _bars(axes: object, outcome: Outcome[Any], labels: list[str], name: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    values, paper = [outcome.values[label][name] for label in labels], outcome.ablation.paper
    width, places = (0.4, range(len(labels))) if paper else (0.7, range(len(labels)))
    halves = [0.0 if math.isnan(value.half) else value.half for value in values]
    shift = width / 2 if paper else 0.0
    axes.bar([x - shift for x in places], [v.mean for v in values], width, yerr=halves, capsize=3, label="here")
    if paper:
        known = [(x + shift, paper[label]) for x, label in enumerate(labels) if label in paper]
        x, y = [place for place, _ in known], [value for _, value in known]
        axes.bar(x, y, width, color="lightgray", label=f"paper ({outcome.ablation.paper_source})")
        axes.legend()
    turn, side = (90, "center") if len(labels) > MOST_SLANTED else (20, "right")
    axes.set_xticks(list(places), labels, rotation=turn, ha=side, fontsize=8)

"""A live ablation: a question, clusters that differ in flags, requests, metrics, an interpretation of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.ablations.common.ablation import Ablation, Case, Estimated, Metric, Outcome
from lab.ablations.live.loads import Shape, requests, specs
from lab.bench.common.workload import Spec
from lab.simulator.config import SimConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """`specs`: requests for a seed and a duration in seconds; `before`: sent first and not measured."""

    name: str
    specs: Callable[[int, float], list[Spec]]
    before: Callable[[int, float], list[Spec]] | None = None


@dataclass(frozen=True, slots=True)
class LiveCase:
    """One cluster under one workload. Without `nodes` it is an external cluster at `url`."""

    label: str
    workload: Workload
    nodes: str = ""
    flags: tuple[str, ...] = ()
    url: str = ""
    series: str = ""
    x: float | None = None


@dataclass(frozen=True, slots=True)
class LiveAblation:
    """Like lab.ablations.common.ablation.Ablation, with clusters instead of simulated cases."""

    name: str
    question: str
    definition: str
    cases: tuple[LiveCase, ...]
    metrics: dict[str, Metric]
    reading: Callable[[dict[str, dict[str, Estimated]]], str]
    ttft_slo_s: float = 2.0
    tbt_slo_s: float = 0.1
    x_name: str = ""


@dataclass(slots=True)
class LiveOutcome:
    """Everything about one live ablation's run."""

    ablation: LiveAblation
    cases: list[LiveCase]
    values: dict[str, dict[str, Estimated]]  # label -> metric -> value
    raw: dict[str, list[dict[str, Any]]]  # label -> figures by seed
    configs: dict[str, Any]  # label -> resolved Config of one node
    source: str

    def shown(self) -> Outcome:
        """For tables and plots, which use labels and values. The papers have no values for this machine."""
        one = self.ablation
        about = Ablation(
            one.name, one.question, one.definition, lambda requests: [], one.metrics, one.reading, x_name=one.x_name,
            paper_source="no figure for machines like these",
        )  # fmt: skip
        points = [
            Case(case.label, SimConfig(), series=case.series, x=case.x, flags=" ".join([case.nodes, *case.flags]))
            for case in self.cases
        ]
        return Outcome(about, points, self.values, self.raw, self.source)


def of_shape(name: str, shape: Shape) -> Workload:
    """An open-loop workload of this shape."""
    return Workload(name, lambda seed, seconds: specs(requests(shape, seed, seconds), seed))

"""A case of a live ablation: a cluster that differs from others in its flags, and the requests that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.live.loads import Shape, requests, specs
from lab.ablations.live.play import Played
from lab.ablations.live.throttle import ALL_FAST, Slow
from lab.bench.common.workload import Spec


@dataclass(frozen=True, slots=True)
class Workload:
    """`specs`: requests for a seed and a duration in seconds. It is called before the nodes start."""

    name: str
    specs: Callable[[int, float], list[Spec]]


Look = Callable[[Sequence[str]], Callable[[Played], dict[str, float]]]
"""Further figures of a run. It is called with the nodes' URLs before the requests, and its result after them."""


def no_look(urls: Sequence[str]) -> Callable[[Played], dict[str, float]]:
    return lambda played: {}


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LiveCase:
    """One cluster under one workload. Without `nodes` it is an external cluster at `url`. prepare: makes what the nodes
    need and this machine may lack; it is called before they start. slow: those of its nodes that are slow and cheap."""

    label: str
    workload: Workload
    nodes: str = ""
    flags: tuple[str, ...] = ()
    url: str = ""
    series: str = ""
    x: float | None = None
    look: Look = no_look
    prepare: Callable[[], None] = nothing
    slow: Slow = ALL_FAST

    def settings(self) -> dict[str, object]:
        return {"nodes": " ".join([self.nodes, *self.flags])}

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        told = {"nodes": self.nodes or self.url, "flags": self.flags, "workload": self.workload.name}
        return told | ({"slow": asdict(self.slow)} if self.slow.nodes else {})


LiveAblation = Ablation[LiveCase]

FAILED = "failed"
"""The metric of every live ablation that does not have one of its own: the share of the requests that have neither an
answer nor a refusal."""

Reading = Callable[[dict[str, dict[str, Estimated]]], str]


def naming_failures(reading: Reading) -> Reading:
    """The same sentences, and one that names the cases in which requests failed."""

    def both(values: dict[str, dict[str, Estimated]]) -> str:
        found = [f'"{case}"' for case, of in values.items() if FAILED in of and of[FAILED].mean > 0]
        named = f" Some requests failed, and their times are in no latency: {', '.join(found)}." if found else ""
        return reading(values) + named

    return both


def of_shape(name: str, shape: Shape) -> Workload:
    """An open-loop workload of this shape."""
    return Workload(name, lambda seed, seconds: specs(requests(shape, seed, seconds), seed))

"""Service classes: the objectives of each, and its share when they compete (reference: fair QoS).

--slo sets the objectives in the form of `spell`: interactive:ttft=1,tbt=0.05;batch:ttft=60. Classes and objectives that
it does not name keep their values from CLASSES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Objectives, not limits. Queue orders compute deadlines from `ttft_s` and shares from `weight`."""

    name: str
    ttft_s: float  # objective of the time to first token
    tbt_s: float  # objective of the time between tokens
    weight: int  # share of prefill tokens while several classes wait


INTERACTIVE = ServiceClass("interactive", ttft_s=1.0, tbt_s=0.05, weight=8)
STANDARD = ServiceClass("standard", ttft_s=5.0, tbt_s=0.1, weight=4)
BATCH = ServiceClass("batch", ttft_s=120.0, tbt_s=1.0, weight=1)

CLASSES: dict[str, ServiceClass] = {c.name: c for c in (INTERACTIVE, STANDARD, BATCH)}
"""Highest first, with the default objectives."""

Classes = Mapping[str, ServiceClass]

RANK: dict[str, int] = {name: rank for rank, name in enumerate(CLASSES)}
"""0 = highest: the last to lose its blocks."""


def with_objectives(text: str) -> dict[str, ServiceClass]:
    """CLASSES with the objectives in `text`, in seconds. Raises ValueError with the reason if `text` is invalid."""
    found = dict(CLASSES)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, objectives = part.partition(":")
        if (name := name.strip()) not in CLASSES:
            raise ValueError(f"no class {name!r}; the classes are {', '.join(CLASSES)}")
        if not colon or not objectives.strip():
            raise ValueError(f"{part!r} names no objective; write {name}:ttft=SECONDS,tbt=SECONDS")
        for objective in objectives.split(","):
            kind, _, value = objective.partition("=")
            if kind.strip() not in ("ttft", "tbt"):
                raise ValueError(f"no objective {kind.strip()!r}; the objectives are ttft and tbt")
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < 1e6:
                raise ValueError(f"{objective.strip()!r} is not a number of seconds above 0")
            of_class = found[name]
            found[name] = (
                replace(of_class, ttft_s=seconds) if kind.strip() == "ttft" else replace(of_class, tbt_s=seconds)
            )
    return found


def scaled(classes: Classes, ttft: float, tbt: float | None = None) -> dict[str, ServiceClass]:
    """The objectives times these factors; without `tbt` both times `ttft`."""
    tbt = ttft if tbt is None else tbt
    return {name: replace(one, ttft_s=one.ttft_s * ttft, tbt_s=one.tbt_s * tbt) for name, one in classes.items()}


def spell(classes: Classes) -> str:
    """All objectives in the format of --slo."""
    return ";".join(f"{one.name}:ttft={one.ttft_s:g},tbt={one.tbt_s:g}" for one in classes.values())

"""Service classes: what each promises, and its share when they compete (reference: fair QoS).

Their objectives are --slo's to say, in the form of `spell`: interactive:ttft=1,tbt=0.05;batch:ttft=60. A class or an
objective that it does not name keeps the one of CLASSES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Objectives, not limits: queue orders read deadlines off `ttft_s` and shares off `weight`."""

    name: str
    ttft_s: float  # first token wanted within
    tbt_s: float  # gap between tokens wanted within
    weight: int  # share of prefill tokens while several classes wait


INTERACTIVE = ServiceClass("interactive", ttft_s=1.0, tbt_s=0.05, weight=8)
STANDARD = ServiceClass("standard", ttft_s=5.0, tbt_s=0.1, weight=4)
BATCH = ServiceClass("batch", ttft_s=120.0, tbt_s=1.0, weight=1)

CLASSES: dict[str, ServiceClass] = {c.name: c for c in (INTERACTIVE, STANDARD, BATCH)}
"""Highest first, with the objectives that hold where nobody names others."""

Classes = Mapping[str, ServiceClass]

RANK: dict[str, int] = {name: rank for rank, name in enumerate(CLASSES)}
"""0 = highest: the last to lose its blocks."""


def with_objectives(text: str) -> dict[str, ServiceClass]:
    """CLASSES with these objectives, in seconds. Raises ValueError that says what is wrong."""
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


def spell(classes: Classes) -> str:
    """All objectives, as --slo takes them."""
    return ";".join(f"{one.name}:ttft={one.ttft_s:g},tbt={one.tbt_s:g}" for one in classes.values())

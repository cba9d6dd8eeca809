"""Service classes: what each promises, and its share when they compete (reference: fair QoS)."""

from __future__ import annotations

from dataclasses import dataclass


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
"""Highest first."""

RANK: dict[str, int] = {name: rank for rank, name in enumerate(CLASSES)}
"""0 = highest: the last to lose its blocks."""

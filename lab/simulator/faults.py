"""Faults of a run, from text or by seed.

    crash:NODE@AT+SECONDS          its memory is lost; it is back, empty, after SECONDS
    slow:NODE@AT+SECONDSxFACTOR    its steps take FACTOR times as long
    rail:NODE@AT+SECONDSxFACTOR    its NIC is FACTOR times as slow
    rank:NODE@AT+SECONDS           one of its --expert-ranks is lost, and back after SECONDS

Several are joined by commas: crash:prefill-0@60+30,slow:decode-1@10+60x3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_FAULT = re.compile(r"(crash|slow|rail|rank):([\w-]+)@([\d.]+)\+([\d.]+)(?:x([\d.]+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One node, from `at` for `seconds` of the run."""

    kind: str  # crash, slow, rail or rank
    node: str
    at: float
    seconds: float
    factor: float = 1.0  # of step times, or of times on the wire


def parse(text: str, nodes: Sequence[str]) -> list[Fault]:
    """Raises ValueError naming --faults."""
    found = []
    for part in filter(None, text.split(",")):
        match = _FAULT.fullmatch(part)
        if match is None or (match[1] in ("slow", "rail")) != (match[5] is not None):
            raise ValueError(
                f"--faults: {part!r} is not crash: or rank:NODE@AT+SECONDS, slow: or rail:NODE@AT+SECONDSxFACTOR"
            )
        if match[2] not in nodes:
            raise ValueError(f"--faults: there is no node {match[2]!r}; nodes are {', '.join(nodes)}")
        fault = Fault(match[1], match[2], float(match[3]), float(match[4]), float(match[5] or 1.0))
        if fault.seconds <= 0 or fault.factor < 1:
            raise ValueError(f"--faults: {part!r} must last longer than 0 s, and slow down by 1 or more")
        found.append(fault)
    return found


def drawn(
    nodes: Sequence[str], every_s: float, down_s: float, until: float, seed: int, kind: str = "crash"
) -> list[Fault]:
    """Faults by chance, one every `every_s` seconds of the cluster on average. No node crashes while it is down; of its
    ranks several may be lost."""
    rng, found, at = Random(seed if kind == "crash" else f"{seed} {kind}"), [], 0.0
    back = dict.fromkeys(nodes, 0.0)
    while every_s and (at := at + rng.expovariate(1 / every_s)) < until:
        up = [node for node in nodes if kind != "crash" or back[node] <= at]
        if up:
            node = rng.choice(up)
            back[node] = at + down_s
            found.append(Fault(kind, node, at, down_s))
    return found

"""Live ablations by name, and the reason why the others are only simulated."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.metrics import COSTS, metric
from lab.ablations.live.batching import COLOCATED
from lab.ablations.live.case import FAILED, LiveAblation, naming_failures
from lab.ablations.live.kv import OVERLAP, QUANTIZED
from lab.ablations.live.overload import OVERLOAD
from lab.ablations.live.placement import SCHEDULING
from lab.ablations.live.pool import BANDWIDTH, POOL
from lab.ablations.live.shifts import SHIFTS
from lab.ablations.live.speculative import SPECULATIVE
from lab.ablations.live.unlike import UNLIKE


def _complete(one: LiveAblation) -> LiveAblation:
    """With the metrics of all. `overload` counts its failures itself: it runs nodes beyond their capacity."""
    made = replace(one, metrics=one.metrics | COSTS)
    if one is OVERLOAD:
        return made
    return replace(made, metrics=made.metrics | {FAILED: metric("failed")}, reading=naming_failures(one.reading))


LIVE: dict[str, LiveAblation] = {
    one.name: _complete(one)
    for one in (SCHEDULING, POOL, BANDWIDTH, COLOCATED, OVERLAP, QUANTIZED, OVERLOAD, SHIFTS, SPECULATIVE, UNLIKE)
}

ELSEWHERE = {
    "regret": "the goals are about 64 and 256 nodes; a machine has a few, where every policy knows everything",
    "ratio": "it splits sixteen nodes in every way; a live run has as many nodes as cores",
    "eviction": "policies differ over hours of a trace; scripts/tools.py cache-policies replays one",
    "orders": "slowdown at the tail needs thousands of requests, which take hours on one node of this machine",
    "migration": "bursts over a dozen decode nodes; scripts/faults.py migrations moves requests between real ones",
    "beyond-memory": "scripts/bench.py beyond-memory measures it on a node of this machine",
    "flexgen": "its figures are of a T4",
    "failure": "scripts/faults.py kill-roles kills real nodes and counts the effects on clients",
}
"""Name -> the reason why there is no live form."""

DEFAULT_REASON = "it needs more nodes and hours than a live run has"


def why_not(name: str) -> str:
    return f"{name} runs in the simulator only: {ELSEWHERE.get(name, DEFAULT_REASON)}"

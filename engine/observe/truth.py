"""Compares the estimates of a placement with the measured times. Pure.

    wait_s      other prompts: from entering the prefill node's queue to its first step, without prefix fetches, and
                the share of other prompts in its own steps
    transfer_s  fetching the prefix
    prefill_s   first step to first token, without that share
    ttft_s      decision to first token, at the acceptor
    handover_s  the KV transfer to the decode node, which the prefill hides in part
    step_s      mean gap between tokens after the first

The error of an estimate is |estimated - measured|, in seconds and as a share of the measured time. Below a millisecond
a share says nothing (0 against 0.35 ms is no 100 %), so a pair of such times has none, and a shorter measured time
counts as a millisecond. The mean of the shares over requests is the MAPE (engine/observe/estimate_errors.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

FLOOR_S = 0.001


class Compared(TypedDict):
    """One estimate with its measured time."""

    estimated_s: float
    measured_s: float
    error_s: float  # absolute
    error: float | None  # as a share of the measured time; None for two times below FLOOR_S


Truth = dict[str, Compared]
"""By the name of the estimate."""


def compare(summary: Mapping[str, Any], estimates: Mapping[str, float]) -> Truth:
    """The estimates that have a measurement, by name. `summary` is that of a Timeline."""
    found: Truth = {}
    for name, measured in measurements(summary).items():
        if measured is not None and name in estimates:
            expected = estimates[name]
            missed = abs(expected - measured)
            share = missed / max(measured, FLOOR_S) if max(expected, measured) >= FLOOR_S else None
            found[name] = {"estimated_s": expected, "measured_s": measured, "error_s": missed, "error": share}
    return found


def measurements(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The measured times by estimate. Empty for a request that was placed again after its first token, because its
    times mix several decisions."""
    if (summary["decision_to_token_ms"] or 0.0) < 0:
        return {}
    tokens, decode_ms, others_ms = summary["output_tokens"], summary["decode_ms"], summary["other_prompts_ms"]
    queue_ms, prefill_ms = summary["queue_ms"], summary["prefill_ms"]
    return {
        "wait_s": _seconds(None if queue_ms is None else queue_ms + others_ms),
        "transfer_s": _seconds(summary["prefix_fetch_ms"]),
        "prefill_s": _seconds(None if prefill_ms is None else prefill_ms - others_ms),
        "ttft_s": _seconds(summary["decision_to_token_ms"]),
        "handover_s": _seconds(summary["transfer_ms"]),
        "step_s": decode_ms / 1000 / (tokens - 1) if decode_ms is not None and tokens > 1 else None,
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else max(0.0, ms) / 1000

"""Compares the estimates of a placement with the measured times. Pure.

    wait_s      from entering the prefill node's queue to its first step, without prefix fetches
    transfer_s  fetching the prefix
    prefill_s   first step to first token
    ttft_s      decision to first token, at the acceptor
    handover_s  the rest of the KV transfer after the end of the prefill
    step_s      mean gap between tokens after the first

The error of an estimate is |estimated - measured| / max(measured, 1 ms): an absolute percentage error that stays finite
when the measured time is 0. Its mean over requests is the MAPE in /metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOOR_S = 0.001


def compare(summary: Mapping[str, Any], estimates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"estimated_s", "measured_s", "error"} of each estimate with a measurement. `summary` is that of a Timeline."""
    found = {}
    for name, measured in measurements(summary).items():
        if measured is not None and name in estimates:
            expected = estimates[name]
            error = abs(expected - measured) / max(measured, FLOOR_S)
            found[name] = {"estimated_s": expected, "measured_s": measured, "error": error}
    return found


def measurements(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The measured times by estimate. Empty for a request that was placed again after its first token, because its
    times mix several decisions."""
    if (summary["decision_to_token_ms"] or 0.0) < 0:
        return {}
    tokens, decode_ms = summary["output_tokens"], summary["decode_ms"]
    return {
        "wait_s": _seconds(summary["queue_ms"]),
        "transfer_s": _seconds(summary["prefix_fetch_ms"]),
        "prefill_s": _seconds(summary["prefill_ms"]),
        "ttft_s": _seconds(summary["decision_to_token_ms"]),
        "handover_s": _seconds(summary["transfer_exposed_ms"]),
        "step_s": decode_ms / 1000 / (tokens - 1) if decode_ms is not None and tokens > 1 else None,
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else max(0.0, ms) / 1000

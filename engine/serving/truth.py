"""What a placement expected beside what was measured afterwards. Pure.

    wait_s      from entering the prefill node's queue to its first step, prefix fetches left out
    transfer_s  fetching the prefix
    prefill_s   first step to first token
    ttft_s      decision to first token, at the acceptor
    handover_s  what was left of moving the KV when the prefill had ended
    step_s      mean gap between tokens after the first

Their error is |estimated - measured| / the greater of measured and 1 ms: an absolute percentage error that does not
blow up where nothing was to be waited for. Its mean over requests is the MAPE that /metrics has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOOR_S = 0.001


def compare(summary: Mapping[str, Any], estimates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Per estimate {"estimated_s", "measured_s", "error"}, those that could be measured; `summary` is a Timeline's."""
    found = {}
    for name, measured in measurements(summary).items():
        if measured is not None and name in estimates:
            expected = estimates[name]
            error = abs(expected - measured) / max(measured, FLOOR_S)
            found[name] = {"estimated_s": expected, "measured_s": measured, "error": error}
    return found


def measurements(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Nothing of a request that was placed again after its first token: its times are of several decisions."""
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

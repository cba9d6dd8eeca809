"""Latency, throughput and goodput from outcomes, defined as `vllm bench serve` defines them.

TTFT   send to first streamed event with a choice
TPOT   (E2EL - TTFT) / (output tokens - 1), only for requests with more than one output token
ITL    every gap between such events, of all requests together
E2EL   send to the last such event
TBT    Mooncake's: per request the mean of its longest 10 % of gaps
goodput  completed requests/s that meet every limit; a request with one token has TPOT 0 here
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.bench.common.client import Outcome

LATENCIES = ("ttft", "tpot", "itl", "tbt", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run: its outcomes, and the seconds from the first send to the last end."""

    outcomes: Sequence[Outcome]
    duration_s: float


def tpot_s(outcome: Outcome) -> float:
    """Seconds per token after the first; 0 for a single token."""
    gaps = outcome.output_tokens - 1
    return (outcome.e2e_s - outcome.ttft_s) / gaps if gaps > 0 else 0.0


def tbt_s(itl_s: Sequence[float]) -> float:
    """Mean of the longest 10 % of gaps, at least one gap."""
    longest = sorted(itl_s, reverse=True)[: math.ceil(len(itl_s) / 10)]
    return sum(longest) / len(longest)


def samples_ms(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """The values behind each latency metric, milliseconds."""
    seconds = {
        "ttft": [o.ttft_s for o in good],
        "tpot": [tpot_s(o) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itl_s],
        "tbt": [tbt_s(o.itl_s) for o in good if o.itl_s],
        "e2el": [o.e2e_s for o in good],
    }
    return {name: [value * 1000 for value in values] for name, values in seconds.items()}


def meets(outcome: Outcome, limits_ms: dict[str, float]) -> bool:
    values = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.e2e_s}
    return all(values[name] * 1000 <= limit for name, limit in limits_ms.items())


def summarize(
    runs: Sequence[Measured], wanted: Sequence[str], percentiles: Sequence[float], goodput_ms: dict[str, float]
) -> dict[str, tuple[float, str]]:
    """metric -> (value, unit) over all runs together; peaks are the largest of any run. Omits latencies without a
    sample (for example if no request had two tokens)."""
    good = [o for run in runs for o in run.outcomes if o.error is None]
    duration = sum(run.duration_s for run in runs)
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    found: dict[str, tuple[float, str]] = {
        "completed": (len(good), "requests"),
        "failed": (sum(len(run.outcomes) for run in runs) - len(good), "requests"),
        "duration": (duration, "s"),
        "total_input_tokens": (prompt, "tokens"),
        "total_cached_tokens": (sum(o.cached_tokens for o in good), "tokens"),
        "total_output_tokens": (output, "tokens"),
        "request_throughput": (len(good) / duration, "requests/s"),
    }
    if goodput_ms:
        found["request_goodput"] = (sum(meets(o, goodput_ms) for o in good) / duration, "requests/s")
    found |= {
        "output_throughput": (output / duration, "tokens/s"),
        "total_token_throughput": ((prompt + output) / duration, "tokens/s"),
        "max_output_tokens_per_s": (max((peak_tokens(run) for run in runs), default=0), "tokens/s"),
        "max_concurrent_requests": (max((peak_concurrency(run) for run in runs), default=0), "requests"),
    }
    samples = samples_ms(good) | {"client_queue": [o.queue_s * 1000 for o in good]}
    queued = ["client_queue"] if any(samples["client_queue"]) and max(samples["client_queue"]) > 1 else []
    for name in [*wanted, *queued]:
        if values := samples[name]:
            found[f"mean_{name}"] = (float(np.mean(values)), "ms")
            found[f"median_{name}"] = (float(np.median(values)), "ms")
            found[f"std_{name}"] = (float(np.std(values)), "ms")
            for q in percentiles:
                found[f"p{q:g}_{name}"] = (float(np.percentile(values, q)), "ms")
    return found


def peak_tokens(run: Measured) -> int:
    """The most tokens in any second since the run's first send. A request's tokens are spread evenly over its
    events."""
    good = [o for o in run.outcomes if o.error is None]
    if not good:
        return 0
    origin = min(o.sent_s for o in good)
    buckets: dict[int, float] = {}
    for o in good:
        times = np.cumsum([o.sent_s - origin + o.ttft_s, *o.itl_s])
        for at in times:
            buckets[int(at)] = buckets.get(int(at), 0.0) + o.output_tokens / len(times)
    return round(max(buckets.values()))


def peak_concurrency(run: Measured) -> int:
    """The most requests in flight at one moment."""
    changes = [(o.sent_s, 1) for o in run.outcomes if o.error is None]
    changes += [(o.sent_s + o.e2e_s, -1) for o in run.outcomes if o.error is None]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak

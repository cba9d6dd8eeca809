"""Figures of the last requests: latencies, errors of their estimates, sources of their prompts' KV. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from engine.observe.estimate_errors import EstimateErrors
from engine.observe.timeline import Timeline

Json = dict[str, Any]

MAX_RECENT_REQUESTS = 200
PERCENTILES = (50, 90, 99)
SOURCES = ("hbm", "arena", "dram", "ssd", "computed")
"""Sources of a prompt's tokens: the prefill node's own arena, another node's arena, the DRAM or SSD tier of the pool,
or computation."""


class Recent:
    """The last MAX_RECENT_REQUESTS requests that ended here with at least one token."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: deque[Json] = deque(maxlen=MAX_RECENT_REQUESTS)
        self._refused: Json | None = None
        self._errors = EstimateErrors()

    def add(self, timeline: Timeline, service_class: str, reason: str | None, ended: float) -> None:
        """reason: the finish reason, None if the client disconnected; ended: unix seconds."""
        summary = timeline.summary()
        self._errors.add(ended, timeline.truth(summary))
        decode_ms, gaps = summary["decode_ms"], timeline.output_tokens - 1
        self._rows.append(
            {
                "id": timeline.request_id,
                "ended": ended,
                "class": service_class,
                "reason": reason or "abort",
                "ttft_ms": summary["ttft_ms"],
                "tpot_ms": decode_ms / gaps if decode_ms is not None and gaps > 0 else None,
                "e2e_ms": summary["e2e_ms"],
                "prompt_tokens": timeline.prompt_tokens,
                "output_tokens": timeline.output_tokens,
                "tokens_from": tokens_from(timeline, self._block_size),
                "nodes": timeline.nodes,
            }
        )

    def refuse(self, request_id: str, ended: float) -> None:
        """A request was refused, with no or few tokens."""
        self._refused = {"id": request_id, "ended": ended}

    def as_dict(self, now: float) -> Json:
        """{"requests": newest first, "refused": the newest refused one, "ttft_ms" and "tpot_ms": {"p50": ...},
        "tokens_from": sums by source, "estimates": their errors in the last minutes before `now`, unix seconds}"""
        rows = list(reversed(self._rows))
        return {
            "requests": rows,
            "refused": self._refused,
            "ttft_ms": percentiles(row["ttft_ms"] for row in rows),
            "tpot_ms": percentiles(row["tpot_ms"] for row in rows),
            "tokens_from": {source: sum(row["tokens_from"][source] for row in rows) for source in SOURCES},
            "estimates": self._errors.at(now),
        }


def tokens_from(timeline: Timeline, block_size: int) -> dict[str, int]:
    """Tokens of the prompt by source; they add up to the prompt."""
    blocks = {"arena": 0, "dram": 0, "ssd": 0}
    for event in timeline.events:
        if event["event"] == "prefix_fetched":
            for tier, count in event["detail"]["tiers"].items():
                blocks[tier] += count
    fetched = {tier: count * block_size for tier, count in blocks.items()}
    # A retried request may have fetched twice, on two nodes.
    own = max(0, timeline.cached_tokens - sum(fetched.values()))
    computed = max(0, timeline.prompt_tokens - own - sum(fetched.values()))
    return {"hbm": own, **fetched, "computed": computed}


def percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """Percentiles of the values that are not None, by the nearest rank; None without values."""
    known: Sequence[float] = sorted(value for value in values if value is not None)
    if not known:
        return None
    last = len(known) - 1
    return {f"p{share}": known[min(last, len(known) * share // 100)] for share in PERCENTILES}

"""The errors of the estimates of the last minutes, of one node or of several. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from engine.observe.truth import Truth

WINDOW_S = 300.0
MAX_REQUESTS = 500

Errors = dict[str, dict[str, Any]]
"""Estimate -> {"requests", "error_s": their mean absolute error, "shares": those whose error is a share, "mape": the
mean of these shares, None without one}."""


class EstimateErrors:
    """Of the requests that ended within WINDOW_S, the last `most`."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._truths: deque[tuple[float, Truth]] = deque(maxlen=most)

    def add(self, ended: float, truth: Truth) -> None:
        """ended: unix seconds, not decreasing."""
        if truth:
            self._truths.append((ended, truth))

    def at(self, now: float) -> Errors:
        while self._truths and self._truths[0][0] < now - WINDOW_S:
            self._truths.popleft()
        found: Errors = {}
        for name in dict.fromkeys(name for _, truth in self._truths for name in truth):
            pairs = [truth[name] for _, truth in self._truths if name in truth]
            shares = [pair["error"] for pair in pairs if pair["error"] is not None]
            found[name] = {
                "requests": len(pairs),
                "error_s": sum(pair["error_s"] for pair in pairs) / len(pairs),
                "shares": len(shares),
                "mape": sum(shares) / len(shares) if shares else None,
            }
        return found


def merged(of_nodes: Iterable[Mapping[str, Mapping[str, Any]]]) -> Errors:
    """The errors over the requests of all nodes."""
    found: Errors = {}
    for errors in of_nodes:
        for name, one in errors.items():
            all_ = found.setdefault(name, {"requests": 0, "error_s": 0.0, "shares": 0, "mape": None})
            requests, shares = all_["requests"] + one["requests"], all_["shares"] + one["shares"]
            all_["error_s"] = (all_["error_s"] * all_["requests"] + one["error_s"] * one["requests"]) / requests
            if one["shares"]:
                total = (all_["mape"] or 0.0) * all_["shares"] + one["mape"] * one["shares"]
                all_["mape"] = total / shares
            all_["requests"], all_["shares"] = requests, shares
    return found

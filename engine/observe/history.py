"""The work of one node in the last 15 minutes, in intervals of a few seconds: for the charts of the live page. Pure.

The parts of the node call one method per event. `close` ends an interval; the caller's clock decides when. Intervals
are numbered by the wall clock, so that those of several nodes can be added up (engine/observe/merged.py). All numbers
of an interval are sums, except `running` and `waiting`: the most that was seen. What is 0 is left out.

Times are counted in logarithmic bins, eight per doubling, because percentiles of several nodes can only be computed
from counts. A percentile is therefore the middle of its bin: at most 4.5 % from the exact one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from engine.observe.moved import Moved

Json = dict[str, Any]

INTERVAL_S = 5.0
KEPT = 180
"""Intervals: 15 minutes."""
MAX_MARKS = 200
BINS_PER_DOUBLING = 8


class History:
    """A bounded ring of intervals, and marks: faults, members that come and go, changes of role."""

    def __init__(self, node_id: str, now: float) -> None:
        """Times named `now` are unix seconds."""
        self._node_id = node_id
        self._moved = Moved(node_id)
        self._does: frozenset[str] | None = None
        self._closed: deque[Json] = deque(maxlen=KEPT)
        self._marks: deque[Json] = deque(maxlen=MAX_MARKS)
        self._open(number(now))

    def _open(self, interval: int) -> None:
        self._number = interval
        self._counts: dict[str, int] = {}
        self._times: dict[str, dict[int, int]] = {"ttft": {}, "tbt": {}}

    # --- events

    def first_token(self, ttft_s: float, prompt_tokens: int, found_tokens: int) -> None:
        """found_tokens: tokens of the prompt whose KV was found instead of computed."""
        self._time("ttft", ttft_s)
        self.count("prompt_tokens", prompt_tokens)
        self.count("found_tokens", found_tokens)
        self.count("output_tokens")

    def next_token(self, gap_s: float) -> None:
        self._time("tbt", gap_s)
        self.count("output_tokens")

    def count(self, name: str, amount: int = 1) -> None:
        """Other names: answered, refused, resumed (requests)."""
        if amount:
            self._counts[name] = self._counts.get(name, 0) + amount

    def load(self, running: int, waiting: int) -> None:
        """Requests on this node at this moment."""
        for name, value in (("running", running), ("waiting", waiting)):
            if value > self._counts.get(name, 0):
                self._counts[name] = value

    def mark(self, now: float, kind: str, node_id: str, text: str) -> None:
        """kind: fault, member or role; node_id: the node that the text is about."""
        self._marks.append({"unix_s": now, "kind": kind, "node_id": node_id, "text": text})

    def role(self, now: float, does: frozenset[str]) -> None:
        """The roles for which this node takes new requests. A change is marked."""
        if self._does not in (None, does):
            said = "takes new requests for " + " and ".join(sorted(does)) if does else "takes no new requests"
            self.mark(now, "role", self._node_id, said)
        self._does = does

    # --- intervals

    def is_over(self, now: float) -> bool:
        """Has the current interval ended?"""
        return number(now) != self._number

    def close(self, now: float, rows: Iterable[Mapping[str, Any]], tiers: Mapping[str, tuple[int, int]]) -> None:
        """End the current interval. rows: see Moved; tiers: (used, capacity) in bytes by tier. A clock that was set
        back makes the history start again."""
        moved, failures = self._moved.since_last(rows)
        for peer, count in failures.items():
            often = "once" if count == 1 else f"{count} times"
            self.mark(now, "fault", peer, f"transfers from {self._node_id} failed {often}")
        if number(now) < self._number:
            self._closed.clear()
        else:
            times = {name: {str(at): count for at, count in bins.items()} for name, bins in self._times.items()}
            more: Json = {"rails": moved, "tiers": dict(tiers), **times}
            self._closed.append({"number": self._number, **self._counts} | {k: v for k, v in more.items() if v})
        self._open(number(now))

    def since(self, after: int) -> Json:
        """The ended intervals with a number above `after`, oldest first, and the marks since then."""
        intervals = [one for one in self._closed if one["number"] > after]
        return {"intervals": intervals, "marks": [one for one in self._marks if number(one["unix_s"]) > after]}

    def _time(self, name: str, seconds: float) -> None:
        bins, at = self._times[name], bin_of(1000 * seconds)
        bins[at] = bins.get(at, 0) + 1


def number(now: float) -> int:
    """Of the interval that contains this moment."""
    return int(now // INTERVAL_S)


def bin_of(ms: float) -> int:
    """Of a time; everything below a microsecond has one bin."""
    return math.floor(BINS_PER_DOUBLING * math.log2(max(ms, 1e-3)))


def middle_of(at: int) -> float:
    """Milliseconds."""
    return float(2 ** ((at + 0.5) / BINS_PER_DOUBLING))

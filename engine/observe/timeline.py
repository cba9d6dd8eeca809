"""The timeline of a request across nodes: the events that its acceptor gathers, and their summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.observe.intervals import Interval, efficiency, shared
from engine.observe.truth import Truth, compare


class Decision(Protocol):
    """A placement. `explain` runs on demand, because it takes longer than the decision."""

    @property
    def estimates(self) -> Mapping[str, float]: ...

    def explain(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Timeline:
    """Events as {"t": unix seconds, "node", "event", "detail"}. Each node stamps its events with its own clock."""

    request_id: str
    prompt_tokens: int
    events: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)  # acceptor, prefill, decode
    decisions: list[Decision] = field(default_factory=list)  # the last one counts
    clocks: dict[str, Any] = field(
        default_factory=dict
    )  # node -> offset_s and error_s of its clock (engine/front/clocks.py)
    trace: Mapping[str, str] = field(default_factory=dict)  # traceparent and tracestate of the client
    output_tokens: int = 0
    cached_tokens: int = 0
    refused: Mapping[str, Any] | None = None  # reason, retry_after_s, and the missed objective if there is one

    def add(self, t: float, node: str, event: str, **detail: Any) -> None:
        self.events.append({"t": t, "node": node, "event": event, "detail": detail})

    def extend(self, events: Iterable[dict[str, Any]]) -> None:
        self.events.extend(events)

    @property
    def dropped_experts(self) -> int:
        """(token, expert) pairs that had no result because a rank was lost (--expert-loss drop), as far as reported."""
        return sum(event["detail"]["pairs"] for event in self.events if event["event"] == "experts_dropped")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the answer of /debug/requests/<id>."""
        summary = self.summary()
        decisions = [decision.explain() for decision in self.decisions]
        return {
            "request_id": self.request_id,
            "events": self._sorted(),
            "summary": summary | {"placement": decisions[-1] if decisions else {}},
            "decisions": decisions,
            "refused": self.refused,
            "truth": self.truth(summary),
            "clocks": self.clocks,
        }

    def truth(self, summary: Mapping[str, Any]) -> Truth:
        """The estimates of the last decision, compared with the measured times: engine/observe/truth.py."""
        return compare(summary, self.decisions[-1].estimates) if self.decisions else {}

    def _sorted(self) -> list[dict[str, Any]]:
        return sorted(self.events, key=lambda event: event["t"])

    def _aligned(self) -> list[dict[str, Any]]:
        """The events in order on the acceptor's clock; clocks of unknown offset are not shifted."""
        offsets = {node: clock["offset_s"] for node, clock in self.clocks.items()}
        events = [event | {"t": event["t"] - offsets.get(event["node"], 0.0)} for event in self.events]
        return sorted(events, key=lambda event: event["t"])

    def summary(self) -> dict[str, Any]:
        """Times of the request's stages in milliseconds; None for stages that it has not reached."""
        events = self._aligned()
        prefill = self.nodes.get("prefill")
        received, begun = _first(events, "accepted"), _first(events, "running", prefill)
        queued, first = _first(events, "waiting", prefill), _first(events, "first_token")
        fetched, moved = _all(events, "prefix_fetched"), _all(events, "kv_moved")
        transfer, compute = spans_of(moved), spans_of(_all(events, "computed", prefill))
        fetch_ms = sum(1000 * e["detail"]["seconds"] for e in fetched)
        wait_ms = _ms(queued, begun)
        others_s = sum(e["detail"].get("others_s", 0.0) for e in _all(events, "computed", prefill))
        return {
            "placement_ms": _ms(received, _first(events, "placed")),
            "queue_ms": None if wait_ms is None else max(0.0, wait_ms - fetch_ms),
            "prefix_fetch_ms": fetch_ms,
            "prefill_ms": _ms(begun, first),
            "other_prompts_ms": 1000 * others_s,
            "transfer_ms": sum(1000 * e["detail"]["seconds"] for e in moved),
            "transfer_exposed_ms": sum(1000 * e["detail"]["exposed_seconds"] for e in moved),
            "transfer_hidden_ms": 1000 * shared(transfer, compute),
            "overlap_efficiency": efficiency(transfer, compute),
            "ttft_ms": _ms(received, first),
            "decision_to_token_ms": _ms(_last(events, "placed"), first),
            "decode_ms": _ms(first, _first(events, "answered")),
            "e2e_ms": _ms(received, _first(events, "answered")),
            "nodes": self.nodes,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "bytes_moved": _bytes_moved(fetched, moved),
        }


def _first(events: list[dict[str, Any]], name: str, node: str | None = None) -> float | None:
    return next((e["t"] for e in events if e["event"] == name and node in (None, e["node"])), None)


def _last(events: list[dict[str, Any]], name: str) -> float | None:
    return max((e["t"] for e in events if e["event"] == name), default=None)


def _all(events: list[dict[str, Any]], name: str, node: str | None = None) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name and node in (None, event["node"])]


def spans_of(events: Iterable[dict[str, Any]]) -> list[Interval]:
    """The (begin, end) intervals of the events' activities, in unix seconds (see Intervals.before)."""
    return [(e["t"] - begin, e["t"] - end) for e in events for begin, end, _ in e["detail"].get("intervals", ())]


def _ms(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else 1000 * (end - begin)


def _bytes_moved(fetched: list[dict[str, Any]], handed_over: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes by transport: prefix fetches plus the KV sent to the decode node."""
    moved: dict[str, int] = {}
    for event in fetched:
        for transport, nbytes in event["detail"]["transports"].items():
            moved[transport] = moved.get(transport, 0) + nbytes
    for event in handed_over:
        transport = event["detail"]["transport"]
        if event["detail"]["bytes"]:
            moved[transport] = moved.get(transport, 0) + event["detail"]["bytes"]
    return moved

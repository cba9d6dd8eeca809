"""Records the timelines and metrics of accepted requests. Timelines are kept for a while after the requests end.

The acceptor calls one method per event; nothing here makes a decision.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from engine.front.clocks import Clocks
from engine.front.declined import Declined
from engine.front.flight import Flight
from engine.front.placed import Placed
from engine.handoff.updates import Report
from engine.observe.history import History
from engine.observe.otlp import SpanExport
from engine.observe.recent import Recent
from engine.observe.timeline import Timeline
from engine.observe.trace_recorder import TraceRecorder
from net.http.common.frontend import Overloaded, Unavailable
from net.loop.log_context import trace_headers
from net.metrics.events import Metrics
from sched.placement.measured_links import MeasuredLinks

MAX_TIMELINES = 1000


class Lessons(Protocol):
    """What placement learns from ended requests (engine/front/placing.py, engine/backends/placing.py)."""

    clocks: Clocks
    links: MeasuredLinks

    @property
    def block_size(self) -> int:
        """Tokens."""

    def learn(self, prefill: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """The measured time from a decision for node `prefill`, with these estimates, to its first token."""


class FlightLog:
    """Timelines and metrics of the requests that `node_id` accepted."""

    def __init__(
        self,
        node_id: str,
        metrics: Metrics,
        placer: Lessons,
        history: History,
        recorder: TraceRecorder | None = None,
        export: SpanExport | None = None,
    ) -> None:
        """`placer`: its clock offsets go into the timelines, and its links learn from reported transfers."""
        self.recent = Recent(placer.block_size)
        self._node_id = node_id
        self._metrics = metrics
        self._placer = placer
        self._history = history
        self._recorder = recorder
        self._export = export
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """Of the newest request with this id."""
        timeline = self._timelines.get(request_id)
        return None if timeline is None else timeline.as_dict()

    # --- in the order of a request's life

    def accepted(self, flight: Flight) -> None:
        """The request was accepted. Call this in the context of its HTTP request, which holds the trace headers."""
        flight.timeline.trace = trace_headers.get() or {}
        self._timelines[flight.request_id] = flight.timeline
        self._timelines.move_to_end(flight.request_id)
        while len(self._timelines) > MAX_TIMELINES:
            self._timelines.popitem(last=False)
        self._add(flight, "accepted", service_class=flight.service_class)

    def declined(self, flight: Flight, declined: Declined) -> None:
        """The request has no placement, or --rejection refuses it."""
        flight.timeline.decisions.append(declined.kept())
        flight.timeline.refused = declined.refused

    def refused(self, flight: Flight, node: str, facts: dict[str, Any]) -> None:
        """The node on which the request was placed refused it."""
        flight.timeline.refused = {"node": node} | facts

    def rejected(self, flight: Flight, error: Overloaded | Unavailable) -> None:
        """The client gets an error."""
        shown = {"reason": str(error), "retry_after_s": error.retry_after_s}
        flight.timeline.refused = shown | dict(flight.timeline.refused or {})
        self._add(flight, "rejected", **shown)
        self.recent.refuse(flight.request_id, time.time())
        self.turned_away(error)

    def turned_away(self, error: Overloaded | Unavailable) -> None:
        """A client gets an error, perhaps before its request had a timeline."""
        self._metrics.count("mooncake:requests_rejected", reason=type(error).__name__.lower())
        self._history.count("refused")

    def waits(self, flight: Flight, reason: str) -> None:
        """No node can take the request now. Recorded once per reason, not per try."""
        last = flight.timeline.events[-1]
        if last["event"] != "waits" or last["detail"]["reason"] != reason:
            self._add(flight, "waits", reason=reason)

    def placed(self, flight: Flight, placed: Placed) -> None:
        timeline, placement = flight.timeline, placed.placement
        timeline.nodes |= {"prefill": placement.prefill, "decode": placement.decode}
        timeline.decisions.append(placed.kept())
        timeline.clocks = self._placer.clocks.of(timeline.nodes.values())
        where: dict[str, Any] = {"prefill": placement.prefill, "decode": placement.decode}
        if placement.group is not None:
            where["group"] = placement.group.as_dict()
            self._metrics.count("mooncake:grouped_prompts")
        if placement.beyond:
            where["beyond_memory"] = True
            self._metrics.count("mooncake:beyond_memory_requests")
        self._add(flight, "placed", **where, attempt=flight.attempt)

    def reserved(self, flight: Flight, decode: str) -> None:
        self._add(flight, "reserved", on=decode)

    def reported(self, flight: Flight, report: Report) -> None:
        """An engine node sent a report, with its first or last token."""
        flight.timeline.extend(report.events)
        self._placer.links.learn(report.events, flight.timeline.nodes["decode"])
        if flight.num_output_tokens == 0:
            flight.timeline.cached_tokens = report.cached_tokens

    def moved(self, flight: Flight, to: str, report: Report) -> None:
        """Another decode node goes on with the request. The report of the old one says how long it paused."""
        flight.timeline.extend(report.events)
        flight.timeline.nodes["decode"] = to
        flight.timeline.clocks = self._placer.clocks.of(flight.timeline.nodes.values())

    def token(self, flight: Flight) -> None:
        """A token arrived. Call this before it is appended to the flight's tokens."""
        now = time.monotonic()
        if flight.num_output_tokens == 0:
            self._add(flight, "first_token")
            flight.first_token = now
            self._metrics.observe_ttft(now - flight.accepted, flight.service_class)
            self._history.first_token(now - flight.accepted, flight.num_prompt_tokens, flight.timeline.cached_tokens)
            self._metrics.count("vllm:prompt_tokens", flight.num_prompt_tokens)
            self._metrics.count("vllm:prefix_cache_queries", flight.num_prompt_tokens)
            self._metrics.count("vllm:prefix_cache_hits", flight.timeline.cached_tokens)
        else:
            self._metrics.observe_itl(now - flight.last_token, flight.service_class)
            self._history.next_token(now - flight.last_token)
        flight.last_token = now
        self._metrics.count("vllm:generation_tokens")

    def attempt_failed(self, flight: Flight, reason: str) -> None:
        detail = {"attempt": flight.attempt, "reason": reason, "tokens": flight.num_output_tokens}
        self._add(flight, "attempt_failed", **detail)

    def adopted(self, flight: Flight) -> None:
        """The client of a lost acceptor has reconnected, and its request was still running."""
        self._add(flight, "adopted", on=flight.timeline.nodes["decode"])

    def redirected(self, flight: Flight, reason: str) -> None:
        self._add(flight, "redirected", attempt=flight.attempt, reason=reason)

    def resumed(self) -> None:
        """Another attempt follows a failed one."""
        self._metrics.count("mooncake:requests_resumed")
        self._history.count("resumed")

    def timed_out(self, flight: Flight) -> None:
        self._add(flight, "timed_out")

    def over(self, flight: Flight, reason: str | None) -> None:
        """The request ended. `reason` is None if the client disconnected or the request was refused."""
        flight.timeline.output_tokens = flight.num_output_tokens
        self._add(flight, "answered" if reason else "aborted")
        if reason:
            self._history.count("answered")
        if self._export is not None:
            self._export.ended(flight.timeline, flight.timeline.trace, reason)
        if not flight.num_output_tokens:
            return
        decode_s = flight.last_token - flight.first_token
        e2e_s = time.monotonic() - flight.accepted
        self._metrics.finish_request(
            reason or "abort", e2e_s, flight.num_prompt_tokens, flight.num_output_tokens, decode_s
        )
        self._metrics.observe("vllm:request_decode_time_seconds", decode_s)
        if self._recorder is not None:
            accepted = flight.timeline.events[0]["t"]
            prompt = flight.token_ids[: flight.num_prompt_tokens]
            self._recorder.ended(accepted, prompt, flight.num_output_tokens, flight.service_class)
        self.recent.add(flight.timeline, flight.service_class, reason, time.time())
        summary = flight.timeline.summary()
        truth = flight.timeline.truth(summary)
        for name, found in truth.items():
            if (share := found["error"]) is not None:
                self._metrics.observe("mooncake:placement_estimate_error", share, estimate=name.removesuffix("_s"))
        if "ttft_s" in truth:
            estimates = flight.timeline.decisions[-1].estimates
            self._placer.learn(flight.timeline.nodes["prefill"], estimates, truth["ttft_s"]["measured_s"])
        if (queue_ms := summary["queue_ms"]) is not None:
            self._metrics.observe("vllm:request_queue_time_seconds", max(0.0, queue_ms) / 1000)
        if (prefill_ms := summary["prefill_ms"]) is not None:
            prefill_s = max(0.0, prefill_ms) / 1000
            self._metrics.observe("vllm:request_prefill_time_seconds", prefill_s)
            self._metrics.observe("vllm:request_inference_time_seconds", prefill_s + decode_s)

    def _add(self, flight: Flight, event: str, **detail: Any) -> None:
        flight.timeline.add(time.time(), self._node_id, event, **detail)

"""Turns a finished request into OpenTelemetry spans: one trace over all its nodes. Needs the extra `otlp`.

    llm_request                     on the acceptor, from accepted to answered; the child of the client's span, if any
      place, reserve blocks, first token, stream                  measured by the acceptor
      state waiting, state loading, state running, ...            of the request on each node
      prefix load, prefill chunk ..., kv transfer, decode         computations and transfers of each node

Every node is a separate resource (service.instance.id). Times of other nodes are converted to the acceptor's clock. The
root span has vLLM's name and attributes, so tools for vLLM's traces can read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine import __version__
from engine.observe.activities import DECODE, KV, LOADS, PREFILL, STATE, Activity, activities, on_one_clock

Json = Mapping[str, Any]

NAMES = {LOADS: "prefix load", PREFILL: "prefill chunk", KV: "kv transfer", DECODE: "decode"}
JOINED = (LOADS, KV, DECODE)
"""Rows with hundreds of short intervals, joined into one span with the number of intervals."""

NOTES = ("adopted", "attempt_failed", "redirected", "timed_out")
"""Events of the timeline that become events of the root span."""

LATENCIES = {
    "gen_ai.latency.time_in_queue": "queue_ms",
    "gen_ai.latency.time_to_first_token": "ttft_ms",
    "gen_ai.latency.time_in_model_prefill": "prefill_ms",
    "gen_ai.latency.time_in_model_decode": "decode_ms",
    "gen_ai.latency.e2e": "e2e_ms",
}

_ids = RandomIdGenerator()
_scope = InstrumentationScope("mooncake", __version__)


def spans(record: Json, model: str, headers: Mapping[str, str], reason: str | None) -> list[ReadableSpan]:
    """The spans of an ended request. `record`: its Timeline.as_dict(). `headers`: traceparent and tracestate from the
    client; empty if the client does not sample the trace. `reason`: the finish reason, None if there is none."""
    parent = get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
    if parent.is_valid and not parent.trace_flags.sampled:
        return []
    events = [on_one_clock(event, record["clocks"]) for event in record["events"]]
    acceptor = record["summary"]["nodes"]["acceptor"]
    trace = parent.trace_id if parent.is_valid else _ids.generate_trace_id()
    state = parent.trace_state if parent.is_valid else None
    root = _context(trace, state)
    own = [event["t"] for event in events if event["node"] == acceptor]
    attributes = _root_attributes(record, model, reason)
    failed = reason is None and any(event["event"] in ("attempt_failed", "timed_out") for event in events)
    made = [
        ReadableSpan(
            name="llm_request",
            context=root,
            parent=parent if parent.is_valid else None,
            resource=_resource(acceptor),
            attributes=attributes,
            events=[_event(event) for event in events if event["event"] in NOTES],
            kind=SpanKind.SERVER,
            instrumentation_scope=_scope,
            status=Status(StatusCode.ERROR if failed or reason == "abort" else StatusCode.UNSET),
            start_time=_ns(min(own)),
            end_time=_ns(max(own)),
        )
    ]
    return made + [_child(one, root, state) for one in joined(activities(record))]


def joined(found: Iterable[Activity]) -> list[Activity]:
    """Join the intervals of an event into one activity, in rows with many intervals."""
    out: list[Activity] = []
    for (_, row), group in groupby(found, key=lambda one: (one.event, one.row)):
        parts = list(group)
        if row not in JOINED:
            out += parts
            continue
        first = parts[0]
        amount, facts = sum(one.amount or 0 for one in parts), {**first.facts, "intervals": len(parts)}
        end = max(one.end for one in parts)
        out.append(Activity(first.node, row, row, first.begin, end, facts, first.event, amount, first.unit))
    return out


def _child(one: Activity, root: SpanContext, state: Any) -> ReadableSpan:
    facts = dict(one.facts) if one.amount is None else {**one.facts, one.unit: one.amount}
    return ReadableSpan(
        name=f"state {one.name}" if one.row == STATE else NAMES.get(one.row, one.name),
        context=_context(root.trace_id, state),
        parent=root,
        resource=_resource(one.node),
        attributes=dict(_flat("mooncake", facts)),
        kind=SpanKind.INTERNAL,
        instrumentation_scope=_scope,
        status=Status(StatusCode.UNSET),
        start_time=_ns(one.begin),
        end_time=_ns(max(one.begin, one.end)),
    )


def _root_attributes(record: Json, model: str, reason: str | None) -> dict[str, Any]:
    summary = record["summary"]
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record["request_id"],
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": summary["prompt_tokens"],
        "gen_ai.usage.completion_tokens": summary["output_tokens"],
        "mooncake.cached_tokens": summary["cached_tokens"],
    }
    if reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [reason]
    attributes |= {name: summary[ms] / 1000 for name, ms in LATENCIES.items() if summary[ms] is not None}
    return attributes | {f"mooncake.{role}": node for role, node in summary["nodes"].items()}


def _event(event: Json) -> Event:
    attributes = dict(_flat("mooncake", event["detail"]))
    return Event(event["event"], attributes=attributes, timestamp=_ns(event["t"]))


def _flat(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Attributes need plain values: nested values become name.of.the.part, and None values are dropped."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif isinstance(value, bool | int | float | str):
        yield name, value
    elif value is not None:
        yield name, str(value)


def _context(trace: int, state: Any) -> SpanContext:
    return SpanContext(trace, _ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED), state)


@lru_cache(maxsize=256)
def _resource(node: str) -> Resource:
    """The resource of a node, including OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment."""
    name = os.environ.get("OTEL_SERVICE_NAME", "mooncake")
    return Resource.create({"service.name": name, "service.version": __version__, "service.instance.id": node})


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

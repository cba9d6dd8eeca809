"""The HTTP request and the trace for which the logging code works; tasks inherit both."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

TRACE_HEADERS = ("traceparent", "tracestate")
trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)
"""W3C trace context as the client sent it, unchecked; None if there is none."""

"""Sends finished requests to an OpenTelemetry collector over OTLP/HTTP (--otlp-traces-endpoint).

The event loop only puts a timeline into a bounded queue. A thread turns it into spans (engine/observe/otlp_spans.py)
and sends many requests in one message. If the collector is slow or gone, the queue fills, and further requests are
dropped and counted. The event loop never waits for the collector.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from engine.observe.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("mooncake.otlp")

QUEUED_REQUESTS = 1000
BATCH_SPANS = 512
SEND_TIMEOUT_S = 5.0
CLOSE_S = 2.0
PATH = "/v1/traces"

Ended = tuple[Timeline, Mapping[str, str], str | None]


class OtlpError(Exception):
    """Traces cannot be exported. The message is one line and says how to fix it."""


class SpanExport:
    """Raises OtlpError at start if the endpoint is not a URL or packages are missing."""

    def __init__(self, endpoint: str, model: str) -> None:
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import SpanExportResult

            from engine.observe.otlp_spans import spans
        except ImportError as error:
            raise OtlpError(
                f"--otlp-traces-endpoint: the OpenTelemetry packages are not installed ({error.name}); "
                "install the extra 'otlp': pip install -e '.[otlp]' in the checkout"
            ) from None
        self._model, self._make, self._success = model, spans, SpanExportResult.SUCCESS
        self._sender = OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S)
        self._ended: queue.Queue[Ended | None] = queue.Queue(QUEUED_REQUESTS)
        self.sent = 0  # spans that the collector accepted
        self._overflowed = self._refused = 0  # requests; the event loop counts the first, the thread the second
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def ended(self, timeline: Timeline, headers: Mapping[str, str], reason: str | None) -> None:
        """A request has ended and its timeline is complete. `headers`: see otlp_spans.spans. Does not block."""
        try:
            self._ended.put_nowait((timeline, headers, reason))
        except queue.Full:
            if not self._overflowed:
                log.warning("losing traces: the collector accepts them too slowly (further losses are only counted)")
            self._overflowed += 1

    @property
    def lost(self) -> int:
        """Number of requests whose spans did not reach the collector."""
        return self._overflowed + self._refused

    def close(self) -> None:
        """Send the remaining spans for at most CLOSE_S. Blocks."""
        with suppress(queue.Full):
            self._ended.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        self._sender.shutdown()  # ends a send that waits for its retry
        if self.lost or self._thread.is_alive():
            log.warning("did not deliver the traces of %d requests", self.lost + self._ended.qsize())

    def _run(self) -> None:
        while (one := self._ended.get()) is not None:
            batch, requests, last = self._spans(one), 1, False
            while len(batch) < BATCH_SPANS and not last:
                try:
                    following = self._ended.get_nowait()
                except queue.Empty:
                    break
                last = following is None
                if following is not None:
                    batch += self._spans(following)
                    requests += 1
            if batch:
                self._send(batch, requests)
            if last:
                return

    def _spans(self, ended: Ended) -> list[ReadableSpan]:
        timeline, headers, reason = ended
        try:
            return self._make(timeline.as_dict(), self._model, headers, reason)
        except Exception:  # a bad trace must not end the thread
            log.exception("could not make the trace of request %s", timeline.request_id)
            return []

    def _send(self, batch: list[ReadableSpan], requests: int) -> None:
        """Send a batch. The sender retries for SEND_TIMEOUT_S, and logs why it gave up."""
        try:
            taken = self._sender.export(batch) is self._success
        except Exception:
            log.exception("could not send %d spans", len(batch))
            taken = False
        self.sent += len(batch) if taken else 0
        self._refused += 0 if taken else requests


def traces_url(endpoint: str) -> str:
    """The collector's address; if it has no path, with OTLP's default path. Raises OtlpError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OtlpError(
            f"--otlp-traces-endpoint {endpoint!r} is not a URL of OTLP over HTTP; give http://HOST:4318 (gRPC, usually "
            "on port 4317, is not supported)"
        )
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else endpoint

"""Finished requests arrive at an OpenTelemetry collector as one trace over their nodes, and nobody waits for it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from engine.observe import otlp
from engine.observe.otlp import OtlpError, SpanExport, traces_url
from net.http.common.middleware import trace_headers_of
from tests.engine.observe.test_timeline import told
from tests.otlp_collector import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENTS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


async def sent(collector: Collector, *ended) -> SpanExport:
    """After `ended` requests were exported."""
    export = SpanExport(collector.url, "tiny")
    for one in ended:
        export.ended(*one)
    await asyncio.to_thread(export.close)
    return export


async def test_one_trace_over_the_nodes_of_a_request():
    async with collecting() as collector:
        export = await sent(collector, (told(), CLIENTS, "stop"))
    spans = collector.spans
    assert (export.sent, export.lost) == (len(spans), 0)
    assert {span.trace for span in spans} == {TRACE} and {span.service for span in spans} == {"mooncake"}
    (root,) = (span for span in spans if span.name == "llm_request")
    assert (root.node, root.parent, root.kind, root.failed) == ("s", PARENT, 2, False)
    assert (root.begin, root.end) == (pytest.approx(1.0), pytest.approx(1.9))
    assert root.attributes["gen_ai.request.id"] == "r" and root.attributes["gen_ai.usage.prompt_tokens"] == 100
    assert root.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.25)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["mooncake.prefill"] == "p"
    others = {(span.node, span.name): span for span in spans if span is not root}
    assert len(others) == len(spans) - 2, "two prefill chunks, all others once"
    assert {span.parent for span in others.values()} == {root.span}
    assert set(others) == {
        ("s", "place"),
        ("s", "first token"),
        ("s", "stream"),
        ("p", "state waiting"),
        ("p", "state running"),
        ("p", "prefix load"),
        ("p", "prefill chunk"),
        ("p", "kv transfer"),
        ("d", "decode"),
    }
    moved = others["p", "kv transfer"]
    assert (moved.begin, moved.end) == (pytest.approx(1.24), pytest.approx(1.29))
    assert moved.attributes["mooncake.bytes"] == 360 and moved.attributes["mooncake.intervals"] == 2
    assert others["p", "prefix load"].attributes["mooncake.transports.shm"] == 640


async def test_traces_without_a_client_and_those_not_sampled():
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    broken = {"traceparent": "00-zz"}
    async with collecting() as collector:
        await sent(collector, (told(), {}, "stop"), (told(), unsampled, "stop"), (told(), broken, "stop"))
    roots = [span for span in collector.spans if span.name == "llm_request"]
    assert len(roots) == 2 and {root.parent for root in roots} == {""}
    assert len({root.trace for root in roots} | {TRACE}) == 3


async def test_a_request_that_failed_says_so():
    timeline = told()
    timeline.add(1.5, "s", "attempt_failed", attempt=0, reason="node d was lost")
    async with collecting() as collector:
        await sent(collector, (timeline, {}, None))
    (root,) = (span for span in collector.spans if span.name == "llm_request")
    assert root.failed and root.events == ["attempt_failed"]


async def test_nothing_waits_for_a_collector_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr(otlp, "QUEUED_REQUESTS", 10)
    monkeypatch.setattr(otlp, "CLOSE_S", 0.05)
    monkeypatch.setattr(otlp, "SEND_TIMEOUT_S", 0.2)
    async with collecting() as collector:
        collector.hold = asyncio.Event()
        export = SpanExport(collector.url, "tiny")
        for _ in range(200):
            export.ended(told(), {}, "stop")
        assert export.lost >= 100, "the queue is bounded"
        await asyncio.to_thread(export.close)
        assert collector.spans == []
        collector.hold.set()
        await asyncio.to_thread(export._thread.join, 20)
    assert "losing traces" in caplog.text and "did not deliver" in caplog.text


@pytest.mark.expects_error("Failed to export spans batch code: 400")
async def test_a_collector_that_refuses_is_counted(caplog):
    async with collecting() as collector:
        collector.status = 400
        export = await sent(collector, (told(), {}, "stop"), (told(), {}, "stop"))
    assert (export.sent, export.lost) == (0, 2)
    assert "did not deliver the traces of 2 requests" in caplog.text


def test_the_endpoint():
    assert traces_url("http://10.0.0.9:4318") == "http://10.0.0.9:4318/v1/traces"
    assert traces_url("https://tempo.example/otlp/v1/traces") == "https://tempo.example/otlp/v1/traces"
    for wrong in ("10.0.0.9:4317", "grpc://10.0.0.9:4317", "http://"):
        with pytest.raises(OtlpError, match="give http://HOST:4318"):
            traces_url(wrong)


def test_without_the_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OtlpError, match=r"extra 'otlp': pip install -e '.\[otlp\]'"):
        SpanExport("http://127.0.0.1:4318", "tiny")


def test_headers_of_a_request():
    from aiohttp.test_utils import make_mocked_request

    assert trace_headers_of(make_mocked_request("GET", "/", CLIENTS)) == CLIENTS
    assert trace_headers_of(make_mocked_request("GET", "/", {"tracestate": "a=1"})) is None

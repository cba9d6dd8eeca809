"""An OpenTelemetry collector for tests: OTLP over HTTP, protobuf, on a free port; keeps the spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Received:
    """One span as it came. Times in unix seconds; `node` is its resource's service.instance.id."""

    name: str
    node: str
    service: str
    trace: str
    span: str
    parent: str
    begin: float
    end: float
    kind: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    status: int = 200
    hold: asyncio.Event | None = None  # answers wait for it

    async def take(self, request: web.Request) -> web.Response:
        if self.hold is not None:
            await self.hold.wait()
        if self.status != 200:
            return web.Response(status=self.status)
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            of = values(resource.resource.attributes)
            self.spans += [received(span, of) for scope in resource.scope_spans for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        node=resource["service.instance.id"],
        service=resource["service.name"],
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        kind=span.kind,
        failed=span.status.code == 2,
        attributes=values(span.attributes),
        events=[event.name for event in span.events],
    )


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(one) for one in found.values] if kind == "array_value" else found

    return {one.key: plain(one.value) for one in attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """On this event loop."""
    collector = Collector()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield collector
    finally:
        if collector.hold is not None:
            collector.hold.set()
        await runner.cleanup()


@contextmanager
def collecting_aside() -> Iterator[Collector]:
    """On an event loop in a thread of its own, for tests that have none."""
    ready, box = Event(), []

    async def serve() -> None:
        stop = asyncio.Event()
        async with collecting() as collector:
            box.extend([collector, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    collector, loop, stop = box
    try:
        yield collector
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

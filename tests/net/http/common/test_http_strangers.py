"""Connections that never ask, ask slowly, or do not speak HTTP: they go, are told why, and /health answers."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack, suppress

import aiohttp
import pytest

from net.http.common import connections
from net.loop.seldom import Seldom
from tests.net.fake_frontend import FakeFrontend, serving

ROOM = 40
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def open_connections(stack: AsyncExitStack, url: str, count: int, said: bytes) -> list[asyncio.StreamReader]:
    readers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(*address(url))
        stack.callback(writer.close)
        writer.write(said)
        readers.append(reader)
    return readers


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What came until the server closed."""
    with suppress(ConnectionError):
        return await reader.read()
    return b""


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"GET /v1/models HT"])
async def test_half_open_requests_keep_nobody_out(said):
    async with serving(FakeFrontend(), max_connections=ROOM) as url, AsyncExitStack() as stack:
        readers = await open_connections(stack, url, 3 * ROOM, said)
        async with aiohttp.ClientSession(url) as session, asyncio.timeout(20):
            for path in ("/health", "/v1/models"):
                async with session.get(path) as response:
                    assert response.status == 200, await response.text()
            assert [await ends(reader) for reader in readers[: 2 * ROOM]] == [b""] * 2 * ROOM, "the oldest went"


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(said):
    async with serving(FakeFrontend(), read_timeout_s=0.2) as url, AsyncExitStack() as stack, asyncio.timeout(20):
        (reader,) = await open_connections(stack, url, 1, said)
        assert await ends(reader) == b""


async def test_a_second_head_that_does_not_come_ends_the_connection():
    async with serving(FakeFrontend(), read_timeout_s=0.2) as url, AsyncExitStack() as stack, asyncio.timeout(20):
        (reader,) = await open_connections(stack, url, 1, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b'"ok"}')
        writer = stack.pop_all()
        async with writer:
            reader._transport.write(b"GET /health HT")
            assert await ends(reader) == b""


async def test_a_body_that_does_not_come_gets_408():
    async with serving(FakeFrontend(), read_timeout_s=0.2) as url, AsyncExitStack() as stack, asyncio.timeout(20):
        (reader,) = await open_connections(stack, url, 1, HEAD + b'{"prompt"')
        head, _, body = (await ends(reader)).partition(b"\r\n\r\n")
        assert b" 408 " in head and "--read-timeout-ms" in json.loads(body)["error"]["message"]


async def test_requests_at_work_outlast_the_read_timeout():
    async with serving(FakeFrontend(delay_s=0.02), read_timeout_s=0.2) as url, aiohttp.ClientSession(url) as session:
        body = {"prompt": "a", "max_tokens": 60, "stream": True}
        async with session.post("/v1/completions", json=body) as stream:
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW /pot\x00 HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -4\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_an_error_body_and_one_line(said, caplog):
    caplog.set_level(logging.INFO)
    async with serving(FakeFrontend()) as url, AsyncExitStack() as stack, asyncio.timeout(20):
        readers = await open_connections(stack, url, 20, said)
        for reader in readers:
            head, _, body = (await ends(reader)).partition(b"\r\n\r\n")
            assert b" 400 " in head.partition(b"\r\n")[0], head
            assert b"Server: mooncake" in head and b"aiohttp" not in head and b"application/json" in head
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    lines = [record for record in caplog.records if "HTTP" in record.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0].getMessage() and lines[0].exc_info is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_the_body_of_a_refused_request_is_not_decompressed(caplog):
    """Seven megabytes of it became as many gigabytes, and the node stood still for seconds."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with serving(FakeFrontend(), api_key="a-long-key") as url, aiohttp.ClientSession(url) as session:
        for _ in range(2):
            async with session.post("/v1/completions", data=b"no gzip", headers=headers, compress=False) as response:
                assert response.status == 401
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_line_comes_once_a_period_with_the_number_left_out():
    seldom = Seldom(10.0)
    assert [seldom.now(t) for t in (0.0, 1.0, 9.9, 10.0, 10.1, 30.0)] == [0, None, None, 2, None, 1]


def test_rooms():
    class Fake:
        closed = False

        def force_close(self):
            self.closed = True

    rooms, fakes = connections.Rooms(2), [Fake() for _ in range(4 + connections.HEALTH_CONNECTIONS_MAX)]
    first, second, third, *rest = fakes
    for one in (first, second):
        rooms.enter(one)
        rooms.begin(one)
    rooms.end(first)
    rooms.enter(third)
    assert first.closed and not rooms.beyond(third), "one that was answered and waits makes room"
    rooms.begin(third)
    for one in rest[:-1]:
        rooms.enter(one)
        rooms.begin(one)
    assert all(rooms.beyond(one) for one in rest[: connections.HEALTH_CONNECTIONS_MAX])
    rooms.enter(rest[-1])
    assert rest[-1].closed and not second.closed and not third.closed
    rooms.leave(second)
    rooms.end(second)
    rooms.leave(rest[0])
    assert not rooms.beyond(rest[0])

"""Connections that arrive together are accepted together, and none is lost while the process has no descriptor left."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack

from net.http.common import accepting
from net.http.common.connections import Connection
from net.http.common.keys import ApiKeys
from net.http.server import HttpServer, create_app
from tests.net.fake_frontend import FakeFrontend

MANY = 200


class Without(socket.socket):
    """A listening socket whose first `failures` accepts find no descriptor."""

    failures = 0

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def listening() -> Without:
    sock = Without()
    sock.bind(("127.0.0.1", 0))
    sock.listen(MANY)
    return sock


async def test_a_burst_is_accepted_in_a_few_turns(monkeypatch):
    made: list[int] = []
    turn = 0
    begin = Connection.connection_made

    def counted(self, transport):
        made.append(turn)
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", counted)
    server = HttpServer(create_app(FakeFrontend(), keys=ApiKeys(None)), shutdown_timeout_s=0.1)
    address = await server.start_on(listening())
    with ExitStack() as opened:
        for _ in range(MANY):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        while len(made) < MANY and turn < 1000:
            turn += 1
            await asyncio.sleep(0)
        assert len(made) == MANY
        assert max(made) < 40, "uvloop by itself takes a turn for each"
    await server.close()


async def test_without_descriptors_connections_wait_and_are_accepted_later(monkeypatch, caplog):
    monkeypatch.setattr(accepting, "PAUSE_S", 0.01)
    server = HttpServer(create_app(FakeFrontend(), keys=ApiKeys(None)), shutdown_timeout_s=0.1)
    sock = listening()
    sock.failures = 3
    host, port = await server.start_on(sock)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert [record.message.split(":")[0] for record in caplog.records if "accepted" in record.message] == [
        "no connection can be accepted"
    ]
    await server.close()
    assert sock.fileno() == -1, "the site closes its socket"


async def test_a_server_ends_while_it_waits_for_descriptors(monkeypatch):
    server = HttpServer(create_app(FakeFrontend(), keys=ApiKeys(None)), shutdown_timeout_s=0.1)
    sock = listening()
    sock.failures = 1
    host, port = await server.start_on(sock)
    with socket.socket() as client:
        client.setblocking(False)
        client.connect_ex((host, port))
        await asyncio.sleep(0.05)
        await server.close()
    assert sock.fileno() == -1

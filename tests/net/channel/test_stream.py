"""The sending half of a stream: over a transport that has failed without a word, and to a peer that does not read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from net.channel.stream import Stream
from net.channel.wire import allocate
from net.errors import PeerLost
from tests.net.peers import until


class ClosedHandle:
    """As uvloop's transport after its handle was closed and before connection_lost."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    writelines = write

    def get_write_buffer_size(self) -> int:
        return 0


def test_a_closed_handle_is_a_lost_peer():
    stream = Stream(cast(Any, None), 1 << 16, None)
    stream._transport = cast(Any, ClosedHandle())
    with pytest.raises(PeerLost, match="handler is closed"):
        stream.send({"bye": True})
    with pytest.raises(PeerLost, match="handler is closed"):
        stream.send_views({"k": 1}, [memoryview(b"ab")], 2)


class Plain(Stream):
    """It only sends."""

    def _usable(self) -> None:
        pass

    def _break(self, reason: str) -> None:
        pass


async def test_what_waits_in_our_socket_is_not_delivered():
    size = 16 << 20
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        made = await asyncio.get_running_loop().create_connection(lambda: Plain(allocate(0), 1 << 16, None), *address)
        transport, stream = made
        peer, _ = await asyncio.to_thread(listener.accept)
        with peer:
            stream.send_views({}, [memoryview(bytes(size))], size)
            await until(lambda: stream.delivered() > 0)
            assert stream.delivered() < stream.queued - stream.unsent() < stream.queued
            received = 0
            while received < stream.queued:
                received += len(await asyncio.to_thread(peer.recv, 1 << 20))
            await until(lambda: stream.delivered() == stream.queued > size)
            transport.abort()
            stream._ended = True
            assert stream.delivered() == stream.queued

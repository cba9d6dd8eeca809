"""The flood of silent connections, and which prompts are new."""

from __future__ import annotations

import asyncio
import socket

from lab.faults.exhaustion import half_new, http_address
from lab.faults.networks.silent_connections import SilentConnections


async def test_closed_connections_are_opened_again_and_all_send_the_greeting():
    heard: list[bytes] = []
    closed, all_heard = 0, asyncio.Event()
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        served.append(asyncio.current_task())
        heard.append(await reader.readexactly(4))
        if len(heard) == 8:
            all_heard.set()
        if closed < 3:
            closed += 1
            writer.close()
            return
        assert await reader.read() == b"", "nothing else is sent"
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()[:2]
        async with SilentConnections([address], 5, b"half") as silent:
            await all_heard.wait()
        await asyncio.gather(*(one for one in served if one is not None))
    assert silent.opened >= 8 and set(heard) == {b"half"}


async def test_connections_that_are_refused_do_not_count():
    """A flood that reached nobody would show nothing."""
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        async with SilentConnections([bound.getsockname()], 5) as silent:
            while silent._tried < 10:  # noqa: ASYNC110 - no event for this
                await asyncio.sleep(0.01)
    assert silent.opened == 0


async def test_a_flood_ends_while_a_connection_opens(monkeypatch):
    """wait_for of Python 3.11 loses a cancellation that comes together with its result: the flood went on for ever."""
    opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    def connect(one: socket.socket, address: object) -> asyncio.Future[None]:
        asked.set()
        return opened

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
    async with asyncio.timeout(20) as limit, SilentConnections([("127.0.0.1", 1)], 5):
        await asked.wait()
        opened.set_result(None)
    assert not limit.expired()


def test_half_of_the_prompts_are_new_in_every_case():
    bodies = [{"prompt": [number]} for number in range(4)]
    assert [body.get("cache_salt") for body in half_new(bodies, "full")] == [None, "full", None, "full"]
    assert all("cache_salt" not in body for body in bodies)


def test_the_port_of_a_node_is_the_one_of_its_url():
    assert http_address("http://127.0.0.1:8000") == ("127.0.0.1", 8000)

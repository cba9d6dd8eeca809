"""The flood of silent connections, and which prompts are new."""

from __future__ import annotations

import asyncio

from lab.faults.exhaustion import half_new, http_address
from lab.faults.silent_connections import SilentConnections


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


def test_half_of_the_prompts_are_new_in_every_case():
    bodies = [{"prompt": [number]} for number in range(4)]
    assert [body.get("cache_salt") for body in half_new(bodies, "full")] == [None, "full", None, "full"]
    assert all("cache_salt" not in body for body in bodies)


def test_the_port_of_a_node_is_the_one_of_its_url():
    assert http_address("http://127.0.0.1:8000") == ("127.0.0.1", 8000)

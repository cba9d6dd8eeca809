"""What an acceptor does with a worker that cannot be reached: a real socket, a made-up placement."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import aiohttp
import pytest

from engine.backends.attempts import WorkerAttempts
from engine.backends.load import Costs
from engine.backends.worker import Worker
from engine.config.backend_address import Address
from engine.front.attempts import NodeUnreachable
from engine.sampling.params import SamplingParams

ROOT = b"r" * 16


@pytest.fixture
def full() -> Iterator[int]:
    """The port of a program whose queue of connections is full: further ones get no answer."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(door.getsockname())
            except TimeoutError:
                break
        yield door.getsockname()[1]


async def test_a_worker_without_room_for_a_connection_is_avoided(full):
    """Its request goes to another one, instead of an error for the client."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=0.1)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        worker = Worker(Address(f"http://127.0.0.1:{full}"), ROOT, session, lambda name: None, Costs())
        placement = SimpleNamespace(prefill=worker.name, prefix_tokens=0)
        placer = SimpleNamespace(place=lambda *given, **named: SimpleNamespace(placement=placement))
        log = SimpleNamespace(placed=lambda *given: None)
        attempts = WorkerAttempts({worker.name: worker}, placer, log, ROOT)
        flight = SimpleNamespace(
            sampling=SamplingParams(max_tokens=5),
            persistence=SimpleNamespace(promised=False),
            as_request=lambda: None,
            timeline=SimpleNamespace(cached_tokens=0),
            token_ids=[1, 2, 3],
            num_prompt_tokens=3,
            num_output_tokens=0,
            attempt_id="one",
            root=ROOT,
            avoid=set(),
            deadline=time.monotonic() + 60,
        )
        with pytest.raises(NodeUnreachable):
            await attempts.start(flight)
        assert flight.avoid == {worker.name}

"""Publishes the batches of this node and sends missed ones again, over ZeroMQ as vLLM does.

PUB      [topic, number, payload] for each batch; the number is 8 bytes, big endian
ROUTER   a subscriber asks [b"", first number] and gets [b"", topic, number, payload] for each kept batch from there on,
         then [b"", b"", -1, b""]

An answer may have thousands of batches. One is sent in each turn of the event loop, when there is room for it in the
socket's queue to this subscriber: without ROUTER_MANDATORY, ZeroMQ would drop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from net.kv_events.backlog import Backlog
from net.kv_events.settings import EventSettings
from net.kv_events.wire import Event, encode
from net.loop.seldom import Seldom
from net.loop.tasks import keep, spawn

log = logging.getLogger("mooncake.kv_events")

END = (-1).to_bytes(8, "big", signed=True)

FIRST_LOOK_S, LOOKS_S = 0.002, 0.1
"""Until the first look whether a subscriber's queue has room again, and between later ones; in between it doubles."""

PATIENCE_S = 60.0
"""A subscriber that takes nothing for this long gets no more of its answer."""


class EventPublisher:
    """Use it on one event loop."""

    def __init__(self, settings: EventSettings) -> None:
        """Opens the sockets. Raises OSError that names the endpoint."""
        self._topic = settings.topic.encode()
        self._backlog = Backlog(settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Socket(self._context, zmq.PUB)  # never blocks: it drops what a subscriber does not take
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self.replay_endpoint: str | None = None
        try:
            self._pub.set_hwm(settings.hwm)
            if is_bound(settings.endpoint):
                self.endpoint = _bind(self._pub, settings.endpoint)
            else:
                _opened(self._pub.connect, settings.endpoint)
                self.endpoint = settings.endpoint
            if settings.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = _bind(self._router, settings.replay_endpoint)
        except OSError:
            self._close_sockets()
            raise

    def start(self) -> None:
        """Answer subscribers that missed batches."""
        if self._router is not None:
            self._replaying = keep(self._replay, "replay of KV events")

    @property
    def published(self) -> int:
        """Batches so far."""
        return self._backlog.next

    def publish(self, unix_s: float, events: Sequence[Event]) -> None:
        """Send one batch."""
        payload = encode(unix_s, events)
        number = self._backlog.add(payload)
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    async def close(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replaying
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    async def _replay(self) -> None:
        """A subscriber that asks again gets the answer to its last question."""
        assert self._router is not None
        answers: dict[bytes, asyncio.Task[None]] = {}
        seldom = Seldom()
        try:
            while True:
                frames = await self._router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    if seldom.now(asyncio.get_running_loop().time()) is not None:
                        log.warning("a subscriber asked for missed KV events with %d frames instead of 3", len(frames))
                    continue
                client, _, first = frames
                if client in answers:
                    answers[client].cancel()
                answers = {name: task for name, task in answers.items() if not task.done()}
                work = self._answer(self._router, client, int.from_bytes(first, "big"))
                answers[client] = spawn(work, "answer with KV events")
        finally:
            for task in answers.values():
                task.cancel()

    async def _answer(self, router: zmq.asyncio.Socket, client: bytes, first: int) -> None:
        for number, payload in self._backlog.since(first):
            if not await _sent(router, (client, b"", self._topic, number.to_bytes(8, "big"), payload)):
                return
        await _sent(router, (client, b"", b"", END, b""))


async def _sent(router: zmq.asyncio.Socket, frames: Sequence[bytes]) -> bool:
    """False if the subscriber has gone, or takes nothing for PATIENCE_S."""
    loop = asyncio.get_running_loop()
    until, pause_s = loop.time() + PATIENCE_S, FIRST_LOOK_S
    while True:
        try:
            await router.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.Again:
            if loop.time() > until:
                log.info("a subscriber does not take the missed KV events that it asked for")
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(LOOKS_S, 2 * pause_s)
        except zmq.ZMQError:  # it has gone
            return False
        else:
            await asyncio.sleep(0)
            return True


def is_bound(endpoint: str) -> bool:
    """Whether this side listens there; else it connects to a subscriber that does."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _bind(socket: Any, endpoint: str) -> str:
    """Returns the endpoint with the port that the kernel chose."""
    _opened(socket.bind, endpoint)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound.rstrip("\0")


def _opened(open_it: Callable[[str], object], endpoint: str) -> None:
    try:
        open_it(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"{endpoint}: {error}") from None

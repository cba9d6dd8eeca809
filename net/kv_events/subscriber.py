"""Follows the events of one publisher, and reports every batch once, in order. It asks again for batches that it
missed, and for those from before its subscription."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from net.kv_events.arrival import Arrival, Verdict
from net.kv_events.wire import Batch, EventError, decode
from net.loop.tasks import keep

log = logging.getLogger("mooncake.kv_events")

REPLAY_S = 5.0
"""Time for the next answer to a question for missed batches. vLLM looks for questions ten times a second."""


class EventSubscriber:
    """`apply(batch)` gets each batch. `forget()` means that nothing is known about the publisher's blocks any more:
    batches were lost, or it was started again. Both run on the event loop."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        apply: Callable[[Batch], None],
        forget: Callable[[], None],
        topic: str = "",
    ) -> None:
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._apply, self._forget = apply, forget
        self._topic = topic.encode()
        self._arrival = Arrival()
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Raises OSError for an endpoint that ZeroMQ does not understand."""
        self._context = zmq.asyncio.Context()
        sub = self._context.socket(zmq.SUB)
        try:
            sub.set_hwm(0)  # what is not read yet waits here
            sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            sub.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"{self._endpoint}: {error}") from None
        self._task = keep(lambda: self._follow(sub), f"KV events of {self._endpoint}")

    def restarted(self) -> None:
        """The publisher's process has ended; the next one numbers its batches from 0."""
        self._arrival.next = 0
        self._forget()

    @property
    def applied(self) -> int:
        """Number of the next batch."""
        return self._arrival.next

    @property
    def lost(self) -> int:
        """Batches that could not be had again."""
        return self._arrival.lost

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _follow(self, sub: zmq.asyncio.Socket) -> None:
        await self._replay()  # what was published before this subscription
        while True:
            frames = await sub.recv_multipart()
            await asyncio.sleep(0)  # a message that waits is received in the same turn of the event loop
            if len(frames) != 3 or len(frames[1]) != 8:
                log.warning("%s: %d frames are no KV events", self._endpoint, len(frames))
                continue
            await self._arrived(int.from_bytes(frames[1], "big"), frames[2])

    async def _arrived(self, number: int, payload: bytes) -> None:
        verdict = self._arrival.judge(number, payload)
        if verdict is Verdict.AGAIN:
            log.info("%s: the publisher was started again", self._endpoint)
            self.restarted()
            verdict = self._arrival.judge(number, payload)
        if verdict is Verdict.GAP:
            await self._replay()
            verdict = self._arrival.judge(number, payload, replayed=True)
        if verdict is Verdict.GAP:
            self._lose(number)
            verdict = Verdict.APPLY
        if verdict is Verdict.APPLY:
            self._take(number, payload)

    def _lose(self, number: int) -> None:
        """Batches before `number` are lost. What they removed would be believed for ever, so nothing is."""
        log.warning("%s: KV events %d to %d are lost", self._endpoint, self._arrival.next, number - 1)
        self._arrival.skip_to(number)
        self._forget()

    def _take(self, number: int, payload: bytes, replayed: bool = False) -> None:
        try:
            batch = decode(payload)
        except EventError as error:
            log.warning("%s: batch %d cannot be read: %s", self._endpoint, number, error)
            self._forget()
        else:
            self._apply(batch)
        self._arrival.applied(number, payload, replayed)

    async def _replay(self) -> None:
        """Ask for the batches from `next` on, and apply them. Returns at their end, or when no answer comes."""
        if self._replay_endpoint is None:
            return
        assert self._context is not None
        asked = self._context.socket(zmq.DEALER)
        asked.set_hwm(0)  # what this queue does not take, vLLM's publisher drops
        try:
            asked.connect(self._replay_endpoint)
            await asked.send_multipart((b"", self._arrival.next.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await asked.recv_multipart()
                await asyncio.sleep(0)
                if len(frames) < 3 or len(frames[-2]) != 8:
                    log.warning("%s: %d frames are no KV events", self._replay_endpoint, len(frames))
                    return
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0:
                    return
                match self._arrival.judge(number, frames[-1], replayed=True):
                    case Verdict.GAP:
                        self._lose(number)
                        self._take(number, frames[-1], replayed=True)
                    case Verdict.APPLY:
                        self._take(number, frames[-1], replayed=True)
        except TimeoutError:
            log.warning("%s did not send KV events again within %g s", self._replay_endpoint, REPLAY_S)
        finally:
            asked.close(linger=0)

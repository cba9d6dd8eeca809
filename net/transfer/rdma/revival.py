"""Restores broken rails of a link: fences them on the other side, then opens them as a new generation.

stop{rail} ──>                      <── stopped{rail}            its old queue pair receives nothing any more
start{rail, generation, endpoint} ──>
                                    <── started{rail, generation, endpoint}  or  {rail, generation, reason}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from net.errors import PeerLost
from net.loop.tasks import keep
from net.transfer.rdma.device import Device
from net.transfer.rdma.pump import Pump
from net.transfer.rdma.questions import Questions
from net.transfer.rdma.queue_pair import VerbsError


class Revival:
    """Watches the ports under a link and its broken rails."""

    def __init__(
        self,
        devices: Sequence[Device],
        pump: Pump,
        questions: Questions,
        join: Callable[[int, Any], None],
        give_up: Callable[[str], None],
    ) -> None:
        """join(rail, endpoint): connect the rail's queue pair to the peer's; raises VerbsError, ValueError.
        give_up(reason): the peer does not answer about a broken rail."""
        self._devices = devices
        self._pump = pump
        self._questions = questions
        self._join = join
        self._give_up = give_up
        self._ended = False
        self._generations = count(1)
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._port_up = [asyncio.Event() for _ in devices]
        self._listeners = [self._port_listener(index) for index in range(len(devices))]
        for device, listener in zip(devices, self._listeners, strict=True):
            device.on_port.append(listener)

    def _port_listener(self, index: int) -> Callable[[bool], None]:
        def changed(active: bool) -> None:
            if self._ended or not self._pump.pairs:
                return
            if active:
                self._pump.rails[index].retry_at = 0.0
                self._port_up[index].set()
                self.revive(index)
            else:
                self._pump.pairs[index].break_off(f"the link of {self._pump.rails[index].name} went down")

        return changed

    def revive(self, index: int) -> None:
        """The rail has broken, or its port is up again. Idempotent."""
        if not self._pump.rails[index].up and index not in self._reviving and not self._ended:
            task = keep(partial(self._bring_back, index), "reopening an RDMA rail")
            self._reviving[index] = task
            task.add_done_callback(lambda _: self._over(index))

    def _over(self, index: int) -> None:
        self._reviving.pop(index, None)
        self.revive(index)  # the rail may have broken again before its task ended

    async def _bring_back(self, index: int) -> None:
        rail = self._pump.rails[index]
        try:
            await self._questions.ask("stopped", {"op": "stop", "rail": index})
            for job in list(self._pump.jobs):
                job.settled(index)
            while True:
                await self._pause(index)
                self._port_up[index].clear()
                try:
                    await self._restart(index)
                    return
                except (VerbsError, ValueError, TimeoutError):
                    rail.postpone(time.monotonic())
        except PeerLost:
            self._ended = True  # the link has ended with its connection
        except TimeoutError:
            self._ended = True
            self._give_up("it does not answer about a broken rail")

    async def _pause(self, index: int) -> None:
        """Wait until the rail may be tried again, or its port is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._pump.rails[index].retry_at - time.monotonic())):
                await self._port_up[index].wait()

    async def _restart(self, index: int) -> None:
        """Start a new generation on both sides. Raises VerbsError, ValueError, TimeoutError, PeerLost."""
        pair = self._pump.pairs[index]
        pair.reset()
        # A late answer to the try before this one is of a queue pair that is no more, and must not count as this one's.
        mine = {
            "op": "start",
            "rail": index,
            "generation": next(self._generations),
            "endpoint": pair.endpoint().to_json(),
        }
        answer = await self._questions.ask("started", mine)
        if not self._devices[index].active:
            raise ValueError("the link is down")
        self._join(index, answer.get("endpoint", answer.get("reason", "no endpoint")))
        self._pump.pump()

    def end(self) -> None:
        """Idempotent."""
        self._ended = True
        for task in list(self._reviving.values()):
            task.cancel()
        for device, listener in zip(self._devices, self._listeners, strict=True):
            if listener in device.on_port:
                device.on_port.remove(listener)

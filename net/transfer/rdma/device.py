"""A card whose completions and events are handled on the event loop, and the memory that is registered with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.loop.tasks import tell
from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable
from net.transfer.rdma.card import Card
from net.transfer.rdma.registrations import Registered, Registrations
from net.transfer.rdma.verbs import VerbsError

log = logging.getLogger("mooncake.net")


class Device(Card):
    """An open device. `on_port(active)` is called when the link goes down or up. Use inside a running loop."""

    def __init__(self, name: str, gid_index: int | None = None) -> None:
        """Raises Unusable with the reason if the device cannot be used."""
        super().__init__(name, gid_index)
        self.on_port: list[Callable[[bool], None]] = []
        self.memory = Registrations(self.pin, self.unpin)
        self._failed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.completions_fd, self._completions_wait)
        self._loop.add_reader(self.events_fd, self._events_wait)

    # --- memory

    def register(self, region: Region) -> Registered:
        """Pin the region for this device, once. Blocks, so use it only for small regions. Raises Unusable naming the
        limit."""
        return self.memory.at_once(region)

    def deregister(self, name: str) -> None:
        """Fence withdrawn memory: the card refuses later requests with its key. Registrations.withdraw says when this
        takes effect. Idempotent."""
        self.memory.withdraw(name)

    # --- completions and events

    def poll(self) -> int:
        """As Card has it; errors are also reported."""
        try:
            return super().poll()
        except Exception as error:
            self._fail(error)
            raise

    def _completions_wait(self) -> None:
        try:
            self.arm()
        except VerbsError as error:
            self._fail(error)
        with suppress(Exception):  # reported
            self.poll()

    def _fail(self, error: Exception) -> None:
        """Lost completions leave transfers that never end, and memory that nobody knows to be free. Opening the device
        again might help, so the node leaves, and can be started again."""
        if not self._failed:
            self._failed = True
            tell(f"completions of {self.name}", error, None)

    def _events_wait(self) -> None:
        if self.port_changed():
            for listener in list(self.on_port):
                listener(self.active)

    async def settled(self) -> None:
        """Deregister everything; returns when no thread pins or unpins any more. Call it before `close`."""
        await self.memory.settled()

    def close(self) -> None:
        """Close the queue pairs first. Errors are only logged: the kernel frees everything when the process ends."""
        self._loop.remove_reader(self.completions_fd)
        self._loop.remove_reader(self.events_fd)
        try:
            self.memory.withdraw_all()
        except VerbsError:
            log.exception("unpinning memory of RDMA device %s", self.name)
        super().close()


async def registered(devices: Sequence[Device], region: Region) -> list[Registered]:
    """The region's keys on each of the devices, which pin it concurrently, in threads. Raises Unusable, also if the
    region was deregistered meanwhile."""
    await asyncio.gather(*(one.memory.soon(region) for one in devices if one.memory.known(region) is None))
    keys = [keys for one in devices if (keys := one.memory.known(region)) is not None]
    if len(keys) < len(devices):
        raise Unusable(f"region {region.name!r} was unregistered during its registration")
    return keys

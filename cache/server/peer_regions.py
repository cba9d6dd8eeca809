"""PeerRegions: the regions of peers on this host, as mapped into this process."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from net.channel.channel import Channel
from net.errors import RemoteError, TransferError
from net.loop.clock import loop_time
from net.loop.tasks import spawn
from net.transfer.common.memory import Region
from net.transfer.common.path import Path
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

RETRY_S = 1.0  # between two attempts to map a region
Name = tuple[str, str]
"""(peer id, name of the region)"""


class View(NamedTuple):
    """A region as long as `path` is the path to its peer; None where it cannot be mapped."""

    path: Path | None
    region: Region | None


class PeerRegions:
    """Maps a region in the background when it is first looked for."""

    def __init__(self, channel: Channel, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._views: dict[Name, View] = {}
        self._opening: dict[Name, asyncio.Task[None]] = {}
        self._rest_until: dict[Name, float] = {}
        channel.on_lost(self._forget)
        channel.on_closed(self._forget)

    def find(self, peer: str, *names: str) -> list[Region] | None:
        """The regions; None if one of them is not mapped (yet). Their memory is theirs: it may change at any time."""
        path = self._transfer.path_of(peer)  # the peer's notices about its regions are handled first
        found: list[Region] = []
        for name in names:
            view = self._views.get((peer, name))
            if view is None or view.path is not path or (view.region is not None and view.region.closed):
                self._begin(peer, name)
            elif view.region is not None:
                found.append(view.region)
        return found if len(found) == len(names) else None

    def _begin(self, peer: str, name: str) -> None:
        if (peer, name) not in self._opening and loop_time() >= self._rest_until.get((peer, name), 0.0):
            self._rest_until[peer, name] = loop_time() + RETRY_S
            self._opening[peer, name] = spawn(self._open(peer, name), "mapping the memory of a peer")

    async def _open(self, peer: str, name: str) -> None:
        path = region = None
        try:
            region = await self._transfer.mapped(peer, name)
            path = self._transfer.path_of(peer)
        except (ConnectionError, RemoteError, TransferError, TimeoutError) as error:
            log.debug("region %r of %s is not mapped: %r", name, peer, error)
        finally:
            del self._opening[peer, name]
        if path is not None:  # otherwise it was not reached, or has been lost since
            self._views[peer, name] = View(path, region)

    def _forget(self, peer: str) -> None:
        for known in (self._views, self._rest_until):
            for name in [name for name in known if name[0] == peer]:
                del known[name]

    async def close(self) -> None:
        """Idempotent."""
        tasks = list(self._opening.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._views.clear()

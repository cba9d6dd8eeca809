"""OtherSites: the pools of other sites, as one node reads them.

Every site has a pool of its own: rendezvous hashing names the homes of a block among the nodes of the site that wrote
it. So a node knows the homes of a block at any site, and asks them as it asks those of its own site.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from cache.block import BlockKey
from cache.homes.rendezvous import Members
from cache.homes.routing import Router
from cache.results import LeadingRun


class Seen(Protocol):
    """Which of some keys a pool has."""

    def leading(self, count: int) -> LeadingRun: ...


class Pool(Protocol):
    """A cache.store.reader.Reader."""

    async def which(self, keys: Sequence[BlockKey], *, leading: bool) -> Seen: ...


Reader = TypeVar("Reader", bound=Pool)


class OtherSites(Generic[Reader]):
    """members(): the live nodes with a share at every other site, by site."""

    def __init__(
        self,
        members: Callable[[], Mapping[str, Members]],
        make_router: Callable[[], Router],
        make_reader: Callable[[Router], Reader],
    ) -> None:
        self._members, self._make_router, self._make_reader = members, make_router, make_reader
        self._pools: dict[str, tuple[Router, Reader]] = {}

    def names(self) -> list[str]:
        """The other sites that have a pool now."""
        return [site for site, members in self._members().items() if members]

    def reader(self, site: str) -> Reader:
        """Reads the pool of that site; it finds nothing if the site has gone."""
        if site not in self._pools:
            router = self._make_router()
            self._pools[site] = router, self._make_reader(router)
        router, reader = self._pools[site]
        router.update(asyncio.get_running_loop().time(), self._members().get(site, {}))
        return reader

    async def find(self, site: str, keys: Sequence[BlockKey], timeout_s: float) -> int | None:
        """Length of the leading run of `keys` that the pool of that site has; None if it does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await self.reader(site).which(keys, leading=True)).leading(len(keys)).blocks
        except TimeoutError:
            return None

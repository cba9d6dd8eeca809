"""Answers: reads and writes of other programs, over TCP, in the memory that this one has registered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from connect.common.raw_memory import view
from connect.engine.messages import READ, WRITE, Places
from connect.engine.ranges import Ranges
from net.bodies import BodyError, decode
from net.errors import RemoteError
from net.transfer.tcp.bulk_call import Answer, Source, Views, joined
from net.transfer.tcp.bulk_calls import BulkCalls


class Answers:
    """On the event loop that changes `ranges`."""

    def __init__(self, bulk: BulkCalls, ranges: Ranges) -> None:
        self._ranges = ranges
        bulk.answer(READ, self._read)
        bulk.receive(WRITE, self._write)

    def _read(self, peer: str, body: dict[str, Any]) -> Answer:
        views, regions = self._memory(body)
        return Answer({}, joined(views), sum(map(len, views)), regions=regions)

    def _write(self, peer: str, body: dict[str, Any], nbytes: int) -> Arriving:
        views, regions = self._memory(body)
        if (room := sum(map(len, views))) != nbytes:
            raise BodyError(f"{nbytes} bytes for places of {room}")
        return Arriving(views, regions)

    def _memory(self, body: dict[str, Any]) -> tuple[list[memoryview], Collection[str]]:
        """The memory, and the regions that it belongs to. Raises BodyError, RemoteError."""
        places = decode(Places, body)
        views: list[memoryview] = []
        regions: set[str] = set()
        for address, length in zip(places.addresses, places.lengths, strict=True):
            found = self._ranges.find(address, length)
            if found is None:
                raise RemoteError(f"{length} bytes at {address:#x} are not registered there", "unregistered")
            regions.add(found[0])
            views.append(view(address, length))
        return views, regions


class Arriving:
    """A write. See net.transfer.tcp.bulk_call.Receiving."""

    def __init__(self, views: Sequence[memoryview], regions: Collection[str]) -> None:
        self.target: Source = Views(views)
        self.regions = regions

    def finish(self, tail: dict[str, Any]) -> Answer:
        return Answer()

    def drop(self) -> None:
        """What has arrived stays."""

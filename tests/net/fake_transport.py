"""A transport inside this process that breaks by seed: what the engine and its users must live with, on demand.

Bytes go in slices over two rails. Each slice may be dropped (and sent again), delayed, overtaken, or delivered twice;
one rail may be slow; after so many slices the peer is cut off. The rules of net.transfer.engine hold all the same: when
`submit` ends, nothing of it moves any more, which the fake proves by raising when a late copy would land.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from net.channel.links import Links
from net.errors import PeerLost, TransferError
from net.transfer.common import rails
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.rails import Rail
from net.transfer.common.spans import Span, check
from net.transfer.common.transport import BULK, Op

SLICE = 32 << 10
ATTEMPTS = 20


@dataclass
class Faults:
    """Shares of slices, and seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0  # at most; different delays are what reorders
    slow_rail_s: float = 0.0  # more for every slice on rail 1
    cut_after: int | None = None  # slices


@dataclass
class Fabric:
    """What the nodes of one test share."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    nodes: dict[str, Fake] = field(default_factory=dict)
    slices: int = 0
    resent: int = 0
    duplicated: int = 0
    order: list[int] = field(default_factory=list)  # priorities of slices, as they went

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)


class Fake:
    """One node's side."""

    name = "fake"

    def __init__(self, links: Links, regions: Mapping[str, Region], fabric: Fabric) -> None:
        self._links, self._regions, self._fabric = links, regions, fabric
        self._open: dict[str, list[Rail]] = {}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        fabric.nodes[links.node_id] = self

    def offer(self) -> dict[str, Any]:
        return {}

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        ways = self._open.setdefault(peer_id, [Rail("fake0"), Rail("fake1")])
        for rail in ways:
            rail.opened()
        return "a list of bytes"

    def is_open(self, peer_id: str) -> bool:
        return peer_id in self._open

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> None:
        if peer_id not in self._open:
            raise PeerLost(f"{peer_id!r} is cut off")
        region = self._fabric.nodes[peer_id]._regions.get(remote)
        if region is None:
            raise TransferError(f"region {remote!r} is not registered there")
        check([(offset, length) for _, offset, length in spans], remote, region.nbytes)
        pieces = [
            (here + at, there + at, min(SLICE, length - at))
            for here, there, length in spans
            for at in range(0, length, SLICE)
        ]
        self._fabric.rng.shuffle(pieces)
        moves = [self._slice(peer_id, op, local, region, piece, priority, landed) for piece in pieces]
        tasks = [asyncio.create_task(move) for move in moves]
        mine = self._tasks.setdefault(peer_id, set())
        mine.update(tasks)
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if peer_id not in self._open:
                raise PeerLost(f"lost {peer_id!r} during a transfer") from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            mine.difference_update(tasks)

    async def _slice(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: Region,
        piece: Span,
        priority: int,
        landed: LandedSpans | None,
    ) -> None:
        fabric, faults = self._fabric, self._fabric.faults
        here, there, length = piece
        for _ in range(ATTEMPTS):
            ways = self._open[peer_id]
            index = rails.choose(ways, length, [1, 1])
            assert index is not None
            ways[index].sent(asyncio.get_running_loop().time(), length)
            await asyncio.sleep(fabric.rng.random() * faults.delay_s + (faults.slow_rail_s if index else 0.0))
            ways[index].arrived(asyncio.get_running_loop().time(), length)
            fabric.slices += 1
            fabric.order.append(priority)
            if fabric.slices == faults.cut_after:
                self._links.drop(peer_id, "the fake was told to cut")
                raise asyncio.CancelledError
            if fabric.rng.random() < faults.drop:
                ways[index].resent += 1
                fabric.resent += 1
                continue
            for _ in range(1 + (fabric.rng.random() < faults.duplicate)):
                if op is Op.READ:
                    local.memory[here : here + length] = remote.memory[there : there + length]
                else:
                    remote.memory[there : there + length] = local.memory[here : here + length]
                if landed is not None:
                    landed.add([piece])
                await asyncio.sleep(0)
                fabric.duplicated += 1
            fabric.duplicated -= 1
            return
        raise TransferError(f"a slice was dropped {ATTEMPTS} times")

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        return [rail.row() for rail in self._open.get(peer_id, [])]

    def withdraw(self, name: str) -> None:
        """A region that has gone is not found by the next submission."""

    def drop(self, peer_id: str) -> None:
        self._open.pop(peer_id, None)
        for task in self._tasks.get(peer_id, set()):
            task.cancel()
        other = self._fabric.nodes.get(peer_id)
        if other is not None and self._links.node_id in other._open:
            other.drop(self._links.node_id)

    async def fence(self, peer_id: str) -> None:
        other = self._fabric.nodes.get(peer_id)
        tasks = other._tasks.get(self._links.node_id, set()) if other is not None else set()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        for peer_id in list(self._open):
            self.drop(peer_id)

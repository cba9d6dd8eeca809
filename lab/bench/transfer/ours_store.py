"""This project's pooled store: a home with one share in the owner's process, a client without a share in the other.

The home opens a new store for every cell: a store has one slot size, and each cell of puts starts with an empty one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from cache.arena import Arena as Slots
from cache.homes.rendezvous import equal_members
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from lab.bench.transfer.agent import Arena, Call, most_puts
from lab.bench.transfer.ours import Loop, timed
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.common.prefault import Prefault
from net.transfer.engine import TransferEngine

LOADED_BYTES = 64 << 20  # of blocks of at most 64 KiB: more would take long to put
Options = dict[str, dict[str, Any]]
HOME = equal_members(["home"])
ORDERS = {"shm": ("shm", "tcp"), "tcp": ("tcp",)}  # in a node's order: small puts use TCP in either case


def make(name: str, role: str, congestion: str) -> Any:
    """NAME-plain is NAME without checksums."""
    _, transport, *plain = name.split("-")
    options = {"tcp": {"congestion": congestion}}
    return Home(transport, options) if role == "owner" else Client(transport, options, checksums=not plain)


async def closed(opened: Sequence[Any]) -> None:
    for one in opened:
        end = one.close()
        if end is not None:
            await end


class Home:
    """Opens a store for a size when the client asks."""

    def __init__(self, transport: str, options: Options) -> None:
        self._loop, self._transport, self._options = Loop(), transport, options
        self._open: list[Any] = []

    def start(self, remote: Arena) -> dict[str, Any]:
        return {"address": self._loop.run(self._up(remote))}

    async def _up(self, remote: Arena) -> tuple[str, int]:
        self._nbytes = remote.nbytes
        self._control = Channel("owner", {})
        self._control.handle("bench.open", self._another)
        return await self._control.start("127.0.0.1")

    async def _another(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        await closed(self._open)
        channel = Channel("home", {})
        transfer = TransferEngine(channel, ORDERS[self._transport], self._options)
        room = self._nbytes * 9 // 8
        region = Region.shared("dram", room // body["size"] * body["size"])
        prefault = Prefault([region], lambda: room, lambda: False)  # as an idle node does
        prefault.start()
        await asyncio.to_thread(prefault.join)
        local = LocalStore(Slots(region, body["size"]), None)
        store = Store("home", channel, transfer, local, lambda: HOME, StoreOptions(block_bytes=body["size"]))
        self._open = [transfer, channel, store, region]
        return {"address": await channel.start("127.0.0.1")}


class Client:
    """put_from and get_into on the arenas. `remote` is set before `connect`: the blocks to read are put from there."""

    remote: Arena

    def __init__(self, transport: str, options: Options, checksums: bool) -> None:
        self._loop, self._transport, self._options = Loop(), transport, options
        self._checksums = checksums
        self._open: list[Any] = []
        self._keys: list[list[bytes]] = []
        self._loaded = 0  # number of calls whose blocks are in the store

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        arenas = {"local": local, "remote": self.remote}
        self._regions = [Region.attach(name, os.dup(arena.memfd), arena.nbytes) for name, arena in arenas.items()]
        self._owner = tuple(info["address"])

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        self._loop.run(self._connect(size))
        most = max(2, LOADED_BYTES // (size * len(calls[0][0]))) if size <= 64 << 10 else len(calls)
        return list(calls[:most])

    async def _connect(self, size: int) -> None:
        await closed(self._open)
        control = Channel("client", {})
        control.introduce("owner", self._owner)
        answer, _ = await control.call("owner", "bench.open", {"size": size})
        channel = Channel("client", {})
        channel.introduce("home", tuple(answer["address"]))
        transfer = TransferEngine(channel, ORDERS[self._transport], self._options)
        self._store = Store(
            "client", channel, transfer, None, lambda: HOME, StoreOptions(block_bytes=size, checksums=self._checksums)
        )
        for region in self._regions:  # mapped once, as a node maps its KV
            self._store.attach(region)
        self._open = [transfer, channel, self._store, control]
        self._block_bytes = size
        self._loaded = 0

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        return list(self._loop.run(self._reads(prepared, seconds) if op == "read" else self._writes(prepared, seconds)))

    async def _reads(self, prepared: Sequence[Any], seconds: float) -> list[float]:
        if self._loaded < len(prepared):
            self._keys = [[os.urandom(16) for _ in theirs] for _, theirs in prepared]
            for keys, (_, theirs) in zip(self._keys, prepared, strict=True):
                await self._store.put_from(keys, "remote", theirs)
            self._loaded = len(prepared)
        pairs = zip(self._keys, prepared, strict=True)
        calls = cycle([(keys, "local", ours) for keys, (ours, _) in pairs])
        blocks = len(prepared[0][0])
        return await timed(
            self._store.get_into, calls, seconds, check=lambda found: _all(found.blocks, blocks, "found")
        )

    async def _writes(self, prepared: Sequence[Any], seconds: float) -> list[float]:
        """Puts under new keys each time. Afterwards reads back the first and the last call, untimed."""
        most = most_puts(self._block_bytes * len(prepared[0][0]), self.remote.nbytes)
        blocks = len(prepared[0][0])
        took = await timed(
            self._store.put_from, self._fresh(prepared), seconds, most, lambda stored: _all(stored, blocks, "stored")
        )
        await self._store.get_into(self._put_keys, "remote", prepared[(len(took) - 1) % len(prepared)][1])
        await self._store.put_from(*next(self._fresh(prepared)))
        await self._store.get_into(self._put_keys, "remote", prepared[0][1])
        return took

    def _fresh(self, prepared: Sequence[Call]) -> Iterator[tuple[list[bytes], str, list[int]]]:
        """The arguments of puts under new keys."""
        for ours, _ in cycle(prepared):
            self._put_keys = [os.urandom(16) for _ in ours]
            yield self._put_keys, "local", ours


def _all(blocks: int, wanted: int, what: str) -> None:
    if blocks != wanted:
        raise RuntimeError(f"{blocks} of {wanted} blocks were {what}")

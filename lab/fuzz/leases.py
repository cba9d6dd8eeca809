"""The leases of a share to two peers (cache/server/leases.py) after arbitrary messages, while time passes. When all
leases have ended, nothing is held or reserved, regardless of the messages and of lost peers."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from cache.arena import Arena
from cache.protocol import Deadlines
from cache.server.server import StoreServer
from cache.tiers.local_store import LocalStore
from net.bodies import BodyError
from net.channel.channel import Channel, Handler
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

SLOTS, SLOT_BYTES = 6, 32
PASSES_S = 0.3  # after every message
DEADLINES = Deadlines(lease_s=2.0, room_s=0.5, durable_s=1.0, flush_s=1.0)
MOST_KEYS, MOST_MESSAGES = 8, 40
PEERS = ("p", "q")
REFUSALS = (BodyError, RemoteError)
"""Errors of a handler that its peer gets; every other one is the handler's mistake (net/channel/channel.py)."""

KEEPING = [
    ["p", "store.reserve", 0, 3, {"lease": 1}],
    ["p", "store.commit", 0, 0, {"lease": 1, "checksums": [1, 2, 3]}],
]
CONTENTS = {"checksums": [9] * 3, "lengths": [32] * 3}
FACTS = {"positions": [1], "costs_s": [0.5], "service_classes": ["batch"]}


def _session(*messages: list[Any]) -> bytes:
    return orjson.dumps([*KEEPING, *messages])


class LeasesTarget:
    """Plays a session: a list of [peer, kind of message, first key, number of keys, body], or [peer] for the peer's
    loss."""

    corpus = (
        _session(["p", "store.pin", 0, 3, {"lease": 2}], ["p", "store.unpin", 0, 0, {"lease": 2, "bad": [1]}]),
        _session(["q", "store.reserve", 3, 2, {"lease": 5, "offer": {"owner": "h", "divert": True}}], ["q"]),
        _session(["q", "store.reserve", 2, 3, {"lease": 5, "offer": {"contents": CONTENTS, "kept": [True] * 3}}]),
        _session(["q", "store.write", 3, 2, {"lengths": [32, 5], "checksums": [1, 2], "offer": {"facts": FACTS}}]),
        _session(["q", "store.pin", 0, 9, {"lease": 7, "leading": True}], ["q", "store.remove", 0, 2, {}], ["q"]),
        _session(["p", "store.keep", 0, 2, {"keep": True}], ["q", "store.durable", 0, 2, {"wait_s": 0.5}]),
    )

    def feed(self, data: bytes) -> None:
        messages = orjson.loads(data)
        if not isinstance(messages, list):
            raise ValueError("no list of messages")
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_play(messages[:MOST_MESSAGES]))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when the session says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Heard(Channel):
    """A channel whose handlers are called without a connection."""

    def __init__(self, node_id: str) -> None:
        self.handlers: dict[str, Handler] = {}
        super().__init__(node_id, {})

    def handle(self, kind: str, handler: Handler) -> None:
        self.handlers[kind] = handler


async def _play(messages: list[Any]) -> None:
    channel = Heard("n")
    transfer = TransferEngine(channel, ["tcp"])
    with Region.private("arena", SLOTS * SLOT_BYTES) as region:
        local = LocalStore(Arena(region, SLOT_BYTES), None)
        share = StoreServer("n", channel, transfer, local, DEADLINES)
        running: list[asyncio.Task[Any]] = []
        for message in messages:
            running += _begun(channel, message)
            await _passes(PASSES_S)
            local.check_integrity()
        for _ in range(100):
            await _passes(PASSES_S)
        if not all(task.done() for task in running):
            raise AssertionError("a message is never answered")
        for error in [task.exception() for task in running]:  # all are heard before the first ends this
            if error is not None and not isinstance(error, REFUSALS):
                raise AssertionError(f"a handler failed: {error!r}") from error
        _check(share, local)
        await transfer.close()
        await channel.close()
        await share.close()
        await local.close()


def _begun(channel: Heard, message: Any) -> list[asyncio.Task[Any]]:
    match message:
        case [str(peer)] if peer in PEERS:
            channel.links.report_lost(peer)
        case [str(peer), str(kind), int(first), int(count), dict(body)] if peer in PEERS and kind in channel.handlers:
            count = min(count, MOST_KEYS)
            data = b"".join(bytes([(first + i) % 256]) * 16 for i in range(count))
            if kind == "store.write":
                data += bytes(count * SLOT_BYTES)
            return [asyncio.ensure_future(channel.handlers[kind](peer, body, memoryview(data)))]
    return []


async def _passes(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds
    for _ in range(5):
        await asyncio.sleep(0)


def _check(share: StoreServer, local: LocalStore) -> None:
    local.check_integrity()
    leases, dram = share.stats()["leases"], local.stats()["dram"]
    if leases or dram["held"] != dram["pinned"] or dram["reserved"]:
        slots = f"{dram['held']} slots held, {dram['pinned']} of them kept, {dram['reserved']} reserved"
        raise AssertionError(f"{leases} leases, {slots} when all is over")

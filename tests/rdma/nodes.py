"""Two nodes in one process, joined by two rails."""

from __future__ import annotations

import asyncio
import random
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass

from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

SIZE = 8 << 20
SIDES = {"a": ["rxa0", "rxa1"], "b": ["rxb0", "rxb1"]}


@dataclass
class Node:
    channel: Channel
    engine: TransferEngine
    region: Region


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def fill(region: Region, seed: int, nbytes: int = SIZE) -> bytes:
    content = random.Random(seed).randbytes(nbytes)
    region.memory[:nbytes] = content
    return content


async def until(condition, seconds=200.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def two_nodes(rails: int = 2, order=("rdma",), size: int = SIZE, overrides=None):
    """(a, b), introduced to each other; region names are 'kv-a' and 'kv-b'."""
    made = {}
    for name, devices in SIDES.items():
        channel = Channel(name, {})
        engine = TransferEngine(
            channel, order, {"rdma": {"devices": devices[:rails], "overrides": (overrides or {}).get(name)}}
        )
        region = Region.private(f"kv-{name}", size)
        engine.register(region)
        await channel.start("127.0.0.1")
        made[name] = Node(channel, engine, region)
    a, b = made.values()
    a.channel.introduce("b", b.channel.links.address)
    b.channel.introduce("a", a.channel.links.address)
    try:
        yield a, b
    finally:
        for node in made.values():
            await node.engine.close()
            await node.channel.close()
            node.region.close()


def rails_of(node: Node, peer: str):
    """The initiator's rails to a peer."""
    return node.engine._transports["rdma"]._peers[peer].rails

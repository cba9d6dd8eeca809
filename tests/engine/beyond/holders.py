"""A node that holds blocks of others, without the rest of a node; as a program it serves until its input ends.

python tests/engine/beyond/holders.py SLOTS  ──> prints its port
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from cache.arena import Arena
from cache.block import BlockGeometry
from cache.tiers.local_store import LocalStore
from engine.beyond.elsewhere import Elsewhere
from engine.beyond.held import Heads
from engine.beyond.holder import Holder
from engine.beyond.messages import LENDS
from engine.config.config import Config
from net.channel.channel import Channel
from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from sched.membership.member import Member

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 3, 6, 2, 32, 16
GEOMETRY = BlockGeometry(LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, "float32")
CONFIG = Config(role="store", dtype="float32", num_threads=1)


@asynccontextmanager
async def holding(channel: Channel, slots: int) -> AsyncIterator[tuple[Holder, LocalStore, list]]:
    """(holder, its share, what it wants to hear of nodes that are lost)"""
    region = Region.shared("dram", slots * GEOMETRY.block_bytes)
    share, downs = LocalStore(Arena(region, GEOMETRY.block_bytes), None), []
    holder = Holder(CONFIG, GEOMETRY, HEADS, share, channel)
    try:
        await holder.start(downs.append)
        yield holder, share, downs
    finally:
        await holder.close()
        await share.close()
        region.close()


def asking(channel: Channel, *nodes: str, always: bool = True) -> Elsewhere:
    """The other side."""
    members = [Member(node, ("", 0), info={LENDS: True}) for node in nodes]
    heads = Heads(HEADS, HEAD_SIZE, torch.float32.itemsize)
    return Elsewhere(GEOMETRY, heads, channel, lambda: members, Metrics("m", "e"), always=always)


async def serve(slots: int) -> None:
    channel = Channel("holder", {})
    _, port = await channel.start("127.0.0.1")
    async with holding(channel, slots):
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await channel.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

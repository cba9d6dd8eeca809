"""Two nodes for tests of the transfer engine: both here, or one in another process."""

import json
from contextlib import asynccontextmanager

import pytest

from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from tests.net.peers import child

MIB = 1 << 20
SIZE = 32 * MIB


@asynccontextmanager
async def pair(order="shm,tcp", theirs="shm,tcp"):
    """(channel, engine, region 'ours') of node 'a' here, and the process of node 'b'."""
    channel = Channel("a", {})
    engine = TransferEngine(channel, order.split(","))
    await channel.start("127.0.0.1")
    with Region.shared("ours", SIZE) as region:
        engine.register(region)
        async with child("node.py", "b", theirs, str(SIZE)) as process:
            channel.introduce("b", tuple(json.loads(await process.stdout.readline())))
            yield channel, engine, region, process
            await engine.close()
            await channel.close()


async def crc(channel, offset, nbytes, name="theirs"):
    return (await channel.call("b", "crc", {"name": name, "offset": offset, "nbytes": nbytes}))[0]["crc"]


both = pytest.mark.parametrize("order", ["shm", "tcp"])


@asynccontextmanager
async def neighbours(order):
    """Two nodes in this process: (engine, region) of 'a' and of 'b'."""
    sides, made = [], []
    for name in ("a", "b"):
        channel = Channel(name, {})
        engine = TransferEngine(channel, [order])
        region = Region.shared(f"of-{name}", SIZE)
        engine.register(region)
        made.append((channel, await channel.start("127.0.0.1"), engine, region))
        sides.append((engine, region))
    made[0][0].introduce("b", made[1][1])
    try:
        yield sides
    finally:
        for channel, _, engine, region in made:
            await engine.close()
            await channel.close()
            region.close()

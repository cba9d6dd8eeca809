"""A node in a process of its own, killed by the test or ended with its input.

peer.py                    node 'b': prints its address and serves
peer.py write HOST PORT    node 'w': writes into the region 'kv-a' of the node at that address, again and again
"""

import asyncio
import json
import sys

from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from tests.rdma.nodes import SIDES, SIZE


async def serve() -> None:
    channel = Channel("b", {})
    engine = TransferEngine(channel, ["rdma"], {"rdma": {"devices": SIDES["b"]}})
    engine.register(Region.private("kv-b", SIZE))
    print(json.dumps(await channel.start("127.0.0.1")), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def write(host: str, port: int) -> None:
    channel = Channel("w", {})
    engine = TransferEngine(channel, ["rdma"], {"rdma": {"devices": SIDES["b"]}})
    region = Region.private("noise", SIZE)
    region.memory[:] = bytes(range(1, 257 - 1)) * (SIZE // 255) + bytes([1]) * (SIZE % 255)
    engine.register(region)
    await channel.start("127.0.0.1")
    peer = await channel.connect((host, port))
    await engine.open(peer)
    print("writing", flush=True)
    while True:
        await engine.submit(peer, Op.WRITE, "noise", "kv-a", [(0, 0, SIZE)])


asyncio.run(write(sys.argv[2], int(sys.argv[3])) if sys.argv[1:] else serve())

"""Node 'b' in a process of its own: prints its address, serves until it is killed or its input ends."""

import asyncio
import json
import sys

from net.channel import Channel
from net.memory import Region
from net.transfer import TransferEngine
from tests.rdma.nodes import SIDES, SIZE


async def main() -> None:
    channel = Channel("b", {})
    engine = TransferEngine(channel, ["rdma"], {"rdma": {"devices": SIDES["b"]}})
    engine.register(Region.private("kv-b", SIZE))
    print(json.dumps(await channel.start("127.0.0.1")), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())

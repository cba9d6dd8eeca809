"""A node in a process of its own that writes what it was told to, again and again, whatever it is answered. Ends with
its stdin."""

import asyncio
import json
import sys
from collections import Counter

import uvloop

from net.channel.channel import Channel
from net.errors import TransferError
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine

NBYTES = 1 << 20
ERRORS = (ConnectionError, TransferError, TimeoutError)


async def main(node_id: str, order: str) -> None:
    channel = Channel(node_id, {})
    engine = TransferEngine(channel, order.split(","))
    region = Region.shared("ones", NBYTES)
    region.memory[:] = b"\xff" * NBYTES
    engine.register(region)
    ends: Counter[str] = Counter()

    async def push(peer_id, body, data):
        spans = [tuple(span) for span in body["spans"]]
        while True:
            try:
                await engine.submit(peer_id, Op.WRITE, "ones", body["remote"], spans, 5.0, epoch=body["epoch"])
                ends["written"] += 1
                await asyncio.sleep(0)  # a small copy gives nobody else a turn
            except ERRORS as error:
                ends[type(error).__name__] += 1
                await asyncio.sleep(0.002)

    async def told(peer_id, body, data):
        return dict(ends)

    channel.handle("push", push)
    channel.handle("told", told)
    host, port = await channel.start("127.0.0.1")
    print(json.dumps([host, port]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.close()
    await channel.close()
    region.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))

"""A node in a process of its own: one region 'theirs', uvloop, orders by control messages. Ends with its stdin."""

import asyncio
import json
import sys
import zlib

import uvloop

from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine


async def main(node_id: str, order: str, nbytes: int) -> None:
    channel = Channel(node_id, {})
    engine = TransferEngine(channel, order.split(","))
    regions = {"theirs": Region.shared("theirs", nbytes)}
    regions["theirs"].memory[:] = bytes(range(256)) * (nbytes // 256)
    engine.register(regions["theirs"])

    async def crc(peer_id, body, data):
        return {"crc": zlib.crc32(regions[body["name"]].memory[body["offset"] :][: body["nbytes"]])}

    async def register(peer_id, body, data):
        make = Region.shared if body["shared"] else Region.private
        regions[body["name"]] = make(body["name"], body["nbytes"])
        regions[body["name"]].memory[:] = bytes([body["value"]]) * body["nbytes"]
        engine.register(regions[body["name"]])

    async def unregister(peer_id, body, data):
        engine.unregister(body["name"])
        regions.pop(body["name"]).close()

    async def submit(peer_id, body, data):
        spans = [tuple(span) for span in body["spans"]]
        done = await engine.submit(peer_id, Op(body["op"]), "theirs", body["remote"], spans, body["timeout_s"])
        return {"nbytes": done.nbytes, "transport": done.transport}

    async def repeat(peer_id, body, data):
        while True:
            await submit(peer_id, body, data)

    for handler in (crc, register, unregister, submit, repeat):
        channel.handle(handler.__name__, handler)
    host, port = await channel.start("127.0.0.1")
    print(json.dumps([host, port]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.close()
    await channel.close()
    for region in regions.values():
        region.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""A home in a process of its own, with static members: `python -m tests.cache.home NAME`. It prints its port and ends
with its stdin."""

import asyncio
import sys

import uvloop

from cache.arena import Arena
from cache.homes.rendezvous import equal_members
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

SLOT = 32 << 10
SLOTS = 256


async def main(name: str) -> None:
    channel = Channel(name, {})
    transfer = TransferEngine(channel, ("shm", "tcp"))
    with Region.shared("dram", SLOTS * SLOT) as region:
        local = LocalStore(Arena(region, SLOT), None)
        store = Store(name, channel, transfer, local, lambda: equal_members([name]), StoreOptions(block_bytes=SLOT))
        _, port = await channel.start("127.0.0.1")
        print(port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await transfer.close()
        await channel.close()
        await store.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))

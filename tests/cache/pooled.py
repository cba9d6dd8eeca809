"""Nodes of a pooled store on the in-memory network of fakes.py, and blocks to put and get."""

import asyncio
import random
from contextlib import asynccontextmanager
from typing import Any

from cache.arena import Arena, checksum
from cache.homes.rendezvous import equal_members, homes
from cache.protocol import Deadlines
from cache.results import GetResult
from cache.ssd import SsdTier
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from cache.tiers.usage import Usage
from net.transfer.common.memory import Region
from tests.cache.fakes import Hub

SLOT = 3000
ROOT = b"r" * 16
PATIENT = Deadlines()
QUICK = Deadlines(lookup_s=0.05, control_s=0.05, transfer_s=0.05, lease_s=0.1, room_s=0.05, shun_s=30)


def key_of(i: int) -> bytes:
    return checksum(i.to_bytes(8, "big")).to_bytes(8, "big") + i.to_bytes(8, "big")


def block_of(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


class Cluster:
    """Nodes with shares and a client each; every store has a region `kv` of its own to put from and get into."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.stores = {}
        self.regions = []
        self.members = []
        self.unseen = {}  # node -> members that it takes for gone

    def view(self, node_id):
        """The members as this node sees them."""
        return equal_members([name for name in self.members if name not in self.unseen.get(node_id, ())])

    async def add(
        self,
        node_id,
        slots=64,
        directory=None,
        backend="lmdb",
        deadlines=PATIENT,
        kv_blocks=64,
        admission=None,
        read_model=None,
        tenants=None,
        **options,
    ):
        """`slots` 0: a node without a share."""
        leases = {"message_block_bytes": 0, "message_call_bytes": 0}
        options = leases | options | {"block_bytes": SLOT, "deadlines": deadlines}
        channel, transfer = self.hub.node(node_id)
        local = None
        if slots:
            arena = Region.shared(f"{node_id}-dram", slots * SLOT)
            ssd = SsdTier(directory, SLOT, 1 << 20, ROOT, backend=backend) if directory is not None else None
            usage = None if tenants is None else Usage(tenants, SLOT)
            local = LocalStore(Arena(arena, SLOT), ssd, admission=admission, read_model=read_model, usage=usage)
            self.regions.append(arena)
            self.members.append(node_id)
        kv = Region.private("kv", kv_blocks * SLOT)
        self.regions.append(kv)
        store = Store(node_id, channel, transfer, local, lambda: self.view(node_id), StoreOptions(**options))
        store.attach(kv)
        store.kv = kv
        self.stores[node_id] = store
        return store

    async def close(self):
        for node_id, store in self.stores.items():
            if store.local is not None and node_id not in self.hub.dead:
                await quiet(store)
                store.local.check_integrity()
            await store.close()
        for region in self.regions:
            region.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.002)


async def quiet(store):
    """Until nothing of the node's share is in use: whatever was leased comes back by itself."""
    await until(lambda: not store.stats()["share"]["leases"] and not store.local.stats()["dram"]["held"])


@asynccontextmanager
async def cluster_of(*nodes: str, **options: Any):
    cluster = Cluster()
    try:
        for node_id in nodes:
            await cluster.add(node_id, **options)
        yield cluster
    finally:
        await cluster.close()


def fill(store, numbers):
    """Blocks `numbers` into the store's kv region; returns keys and offsets."""
    for at, i in enumerate(numbers):
        store.kv.memory[at * SLOT : (at + 1) * SLOT] = block_of(i)
    return [key_of(i) for i in numbers], [at * SLOT for at in range(len(numbers))]


async def put(store, numbers):
    keys, offsets = fill(store, list(numbers))
    return await store.put_from(keys, "kv", offsets)


async def get(store, numbers) -> GetResult:
    """Gets and checks that everything reported is really there."""
    numbers = list(numbers)
    store.kv.memory[:] = bytes(len(store.kv.memory))
    result = await store.get_into([key_of(i) for i in numbers], "kv", [at * SLOT for at in range(len(numbers))])
    for at, i in enumerate(numbers[: result.blocks]):
        assert store.kv.memory[at * SLOT : (at + 1) * SLOT] == block_of(i)
    assert result.nbytes == result.blocks * SLOT
    for counts in (result.sources, result.transports, result.tiers):
        assert sum(counts.values()) == result.blocks
    return result


async def lookup(store, numbers):
    return await store.lookup([key_of(i) for i in numbers])


def home_of(cluster, i):
    return homes(key_of(i), equal_members(cluster.members))[0]


def of_home(cluster, home, count):
    """Numbers of the first `count` blocks whose home is `home`."""
    return [i for i in range(1000) if home_of(cluster, i) == home][:count]

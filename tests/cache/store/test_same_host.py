"""Gets and lookups at a home of this host: without a message, and never with other bytes."""

import asyncio
import weakref

import pytest

from cache.store import same_host
from net.compiled import NotCompiled
from tests.cache.pooled import until
from tests.cache.store.test_store_net import BLOCKS, KEYS, OFFSETS, SLOT, Node, fill

SOME = slice(0, 4)  # the home's DRAM holds six


@pytest.fixture(params=["compiled", "python"])
async def pair(tmp_path, monkeypatch, request):
    """A home and a client whose memories are mapped; `asked` counts the messages that the home gets."""
    if request.param == "python":
        monkeypatch.setattr(same_host, "BlockRead", no_compiler)
    members = ["home"]
    home, client = Node("home", ("shm", "tcp"), members, tmp_path), Node("client", ("shm", "tcp"), members, None)
    await home.start([])
    await client.start([home])
    home.asked = []
    for kind, handler in list(home.channel._handlers.items()):

        async def told(peer, body, data, kind=kind, handler=handler):
            home.asked.append(kind)
            return await handler(peer, body, data)

        home.channel.handle(kind, told)
    fill(client)
    assert await client.store.put_from(KEYS[SOME], "kv", OFFSETS[SOME]) == 4
    while client.store.same_host.view("home") is None:  # looked for since the first call
        await client.store.lookup(KEYS[SOME])
        await asyncio.sleep(0.01)
    assert (client.store.same_host._code is None) == (request.param == "python")
    await home.local.drain()
    home.asked.clear()
    yield home, client
    await client.close()
    await home.close()


def no_compiler():
    raise NotCompiled("none here")


async def get(client, part=SOME):
    """Blocks found; what was found is compared."""
    client.kv.memory[:] = bytes(client.kv.nbytes)
    result = await client.store.get_into(KEYS[part], "kv", OFFSETS[part])
    for offset, block in list(zip(OFFSETS[part], BLOCKS[part], strict=True))[: result.blocks]:
        assert client.kv.memory[offset : offset + SLOT] == block
    return result


async def test_nobody_is_asked_and_the_home_hears_of_it_later(pair):
    home, client = pair
    hits = home.local.stats()["dram"]["hits"]
    assert await client.store.lookup(KEYS[SOME]) == 4
    result = await get(client)
    assert (result.blocks, result.transports, result.tiers) == (4, {"shm": 4}, {"dram": 4})
    assert home.asked == []
    await until(lambda: home.asked)
    assert home.asked == ["store.used"]
    assert home.local.stats()["dram"]["hits"] == hits + 4


async def test_what_is_not_in_the_index_is_asked_for(pair):
    home, client = pair
    fill(client)
    assert await client.store.put_from(KEYS[4:8], "kv", OFFSETS[4:8]) == 4  # two of the first leave DRAM for SSD
    result = await get(client, slice(0, 8))
    assert result.blocks == 8
    assert result.tiers["ssd"] >= 2
    assert {"store.read", "store.pin"} & set(home.asked)
    assert await client.store.exists_many([KEYS[0], KEYS[20]]) == [True, False]


async def test_other_bytes_are_noticed_and_asked_about(pair):
    """The home's memory is changed under the reader, as by a block that takes the slot of another: the index says one
    checksum, the bytes have another. In words the home finds the damage, and the copy on SSD answers the next get."""
    home, client = pair
    (pin,) = await home.local.pinning.pin_each([KEYS[1]], leading=True)
    home.local.arena.memory(pin.slot)[9] ^= 1
    home.local.pinning.unpin([pin.slot])
    assert (await get(client)).blocks == 1
    assert client.store.stats()["corrupt"] == 1
    await until(lambda: home.local.stats()["dram"]["corrupt"] == 1)
    result = await get(client)
    assert (result.blocks, result.tiers) == (4, {"dram": 3, "ssd": 1})


async def test_a_home_that_goes_takes_its_memory_along(pair):
    home, client = pair
    await home.transfer.close()
    await home.channel.close()
    await until(lambda: client.store.same_host.view("home") is None)
    assert (await get(client)).blocks == 0


async def test_the_memory_of_a_lost_home_is_not_kept(pair):
    """Nobody asks a home that is gone, and a new one has another name: the view must go by itself."""
    home, client = pair
    index = weakref.ref(client.store.same_host.view("home").blocks)
    assert index() is not None
    await home.transfer.close()
    await home.channel.close()
    await until(lambda: index() is None)
    assert client.store.same_host.known("home") is None

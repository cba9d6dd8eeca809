"""The pooled store over nodes whose shares have an SSD tier."""

import pytest

from cache.arena import UNCHECKED
from cache.ssd import backends
from tests.cache.pooled import SLOT, block_of, cluster_of, get, key_of, lookup, put


@pytest.mark.parametrize("backend", sorted(backends))
async def test_more_blocks_than_dram_come_through_it_from_ssd(tmp_path, backend):
    async with cluster_of("client", slots=0) as cluster:
        client, b = cluster.stores["client"], await cluster.add("b", slots=4, directory=tmp_path, backend=backend)
        assert await put(client, range(40)) == 40
        result = await get(client, range(40))
        assert result.blocks == 40
        assert result.tiers["ssd"] >= 36
        assert await lookup(client, range(41)) == 40
        await b.local.drain()


@pytest.mark.parametrize("backend", sorted(backends))
async def test_acknowledged_is_readable(tmp_path, backend):
    """Upstream lost more than half of 400 values here (reference/transfer.md, section 8); the SSD tier has room."""
    async with cluster_of("client", slots=0) as cluster:
        client = cluster.stores["client"]
        for node in "abc":
            await cluster.add(node, slots=8, directory=tmp_path / node, backend=backend)
        stored = [i for i in range(400) if await put(client, [i])]
        assert len(stored) == 400
        assert [i for i in stored if (await get(client, [i])).blocks == 0] == []


@pytest.mark.parametrize("backend", sorted(backends))
async def test_a_restarted_node_finds_its_blocks_again(tmp_path, backend):
    async with cluster_of() as cluster:
        client = await cluster.add("client", slots=0)
        b = await cluster.add("b", directory=tmp_path, backend=backend)
        await put(client, range(20))
        await b.close()
        cluster.members.clear()
        await cluster.add("b", directory=tmp_path, backend=backend)
        result = await get(client, range(20))
        assert (result.blocks, result.tiers) == (20, {"ssd": 20})


@pytest.mark.parametrize("way", [{}, {"message_call_bytes": 1 << 20}], ids=["transfers", "messages"])
@pytest.mark.parametrize("backend", sorted(backends))
async def test_without_checksums_only_reads_from_ssd_are_compared(tmp_path, way, backend):
    async with cluster_of("client", slots=0, checksums=False, **way) as cluster:
        client = cluster.stores["client"]
        b = await cluster.add("b", slots=4, directory=tmp_path, backend=backend)
        assert await put(client, range(4)) == 4
        await b.local.drain()
        assert (await get(client, range(4))).blocks == 4
        (pin,) = await b.local.pinning.pin_each([key_of(2)], leading=True)
        assert pin.checksum == UNCHECKED
        b.local.arena.memory(pin.slot)[5] ^= 1
        b.local.pinning.unpin([pin.slot])
        await client.get_into([key_of(2)], "kv", [0])
        assert client.kv.memory[:SLOT] != block_of(2), "nobody looked"
        assert await b.local.verify(key_of(2)), "and nobody can tell"
        for i in range(4, 12):
            assert await put(client, [i]) == 1
        await b.local.drain()
        result = await get(client, [2])
        assert result.tiers == {"ssd": 1}, "the copy on SSD is as it was put, and has a checksum"

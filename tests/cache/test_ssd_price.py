"""What reads from SSD cost: measured by the home, carried with its answers, and added up by who asks."""

from __future__ import annotations

import orjson

from cache.messages import Look
from cache.protocol import ABSENT
from cache.results import LeadingRun
from cache.ssd_reads import FREE, SsdPrice, SsdReads
from cache.store.reader import Seen
from net.bodies import decode, encode
from sched.cost import TransferModel
from tests.cache.pooled import SLOT, cluster_of, get, key_of, put


def test_reads_teach_what_a_block_costs_and_what_is_queued_is_waited_for():
    reads = SsdReads(1 << 20, TransferModel(1e-4, 1e9))
    for batch in (1, 4, 16, 32) * 8:
        depths = [reads.asked() for _ in range(batch)]
        for depth in depths:  # 2 ms each, and 5 ms before the first
            reads.over(depth, 5e-3 + 2e-3 * depth / (1 << 20), good=True)
    assert reads.queued_bytes == 0
    idle = reads.price()
    assert abs(idle.block_s - 2e-3) < 3e-4 and abs(idle.fixed_s - 5e-3) < 1.5e-3
    for _ in range(100):
        reads.asked()
    busy = reads.price()
    assert abs(busy.fixed_s - idle.fixed_s - 100 * idle.block_s) < 0.02
    assert busy.seconds(10) > idle.seconds(10) and busy.seconds(0) == 0.0


def test_reads_that_failed_teach_nothing():
    reads = SsdReads(SLOT, TransferModel(1e-4, 1e9))
    before = reads.price()
    reads.over(reads.asked(), 30.0, good=False)
    assert reads.price() == before and reads.queued_bytes == 0
    assert SsdReads(SLOT, None).price() == FREE


def test_a_look_comes_back_from_the_wire():
    for look in (Look([0, 0, ABSENT], [1], SsdPrice(0.25, 0.5)), Look([0])):
        assert decode(Look, orjson.loads(orjson.dumps(encode(look)))) == look


def test_homes_read_side_by_side_and_only_the_leading_run_counts():
    seen = Seen({0, 1, 2, 3, 5}, {2: "a", 3: "b", 5: "b"}, {"a": SsdPrice(1.0, 0.5), "b": SsdPrice(0.1, 0.2)})
    assert seen.leading(6) == LeadingRun(4, 2, 2, 1.5)
    assert Seen({0, 1}).leading(3) == LeadingRun(2, 2, 0, 0.0)
    assert Seen().leading(2) == LeadingRun(0)


async def test_a_lookup_tells_what_lies_on_ssd_and_what_that_costs(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client = cluster.stores["client"]
        home = await cluster.add("a", slots=8, directory=tmp_path, read_model=TransferModel(1e-4, 1e9))
        assert await put(client, range(60)) == 60
        await home.local.drain()
        keys = [key_of(i) for i in range(60)]
        found = await client.find(keys)
        wanted = [home.local.contains(key) for key in keys]
        assert found.blocks == 60 and found.ssd_blocks == wanted.count("ssd") == 52
        assert found.dram_blocks == wanted.index("ssd")
        assert found.ssd_s > 0
        assert (await get(client, range(60))).blocks == 60
        stats = home.local.stats()["ssd"]
        assert stats["queued_bytes"] == 0 and stats["wait_s"] >= 0 and stats["block_s"] >= 0
        assert home.local._reads._model.regression.observations >= 52, "its own reads were measured"
        again = await client.find(keys)
        assert again.ssd_s != found.ssd_s


async def test_without_a_disk_all_is_in_dram():
    async with cluster_of("a", "b") as cluster:
        await put(cluster.stores["a"], range(10))
        found = await cluster.stores["b"].find([key_of(i) for i in range(11)])
        assert found == LeadingRun(10, 10, 0, 0.0)

"""The transfer engine over real verbs."""

import asyncio

import pytest

from net.transfer.common.memory import Region
from net.transfer.common.topology import Overrides
from net.transfer.engine import Op, PeerLost, TransferError
from tests.rdma.nodes import SIZE, fill, rails_of, sh, two_nodes, until

MIB = 1 << 20


async def test_read_and_write():
    async with two_nodes() as (a, b):
        sent = fill(a.region, 1)
        done = await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)])
        assert (done.nbytes, done.transport) == (SIZE, "rdma")
        assert bytes(b.region.memory) == sent
        kept = fill(b.region, 2)
        await a.engine.submit("b", Op.READ, "kv-a", "kv-b", [(0, 5, 3 * MIB), (4 * MIB, 4 * MIB, 7)])
        assert bytes(a.region.memory[: 3 * MIB]) == kept[5 : 5 + 3 * MIB]
        assert bytes(a.region.memory[4 * MIB : 4 * MIB + 7]) == kept[4 * MIB : 4 * MIB + 7]
        assert bytes(a.region.memory[4 * MIB + 7 : 5 * MIB]) == sent[4 * MIB + 7 : 5 * MIB]
        assert a.engine.path_of("b").reason == "RDMA over rxa0, rxa1"


async def test_scattered_spans_use_both_rails_and_more_requests_than_a_queue_holds():
    async with two_nodes() as (a, b):
        sent = fill(a.region, 3)
        length, count = 4096, 1000
        spans = [(i * 2 * length, (count - 1 - i) * 2 * length, length) for i in range(count)]
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", spans)
        for here, there, _ in spans:
            assert bytes(b.region.memory[there : there + length]) == sent[here : here + length]
        rails = a.engine.snapshot()[0]["rails"]
        assert [rail["rail"] for rail in rails] == ["rxa0", "rxa1"]
        assert all(rail["up"] and rail["bytes"] and not rail["in_flight"] for rail in rails)


async def test_both_directions_at_once():
    async with two_nodes() as (a, b):
        first, second = fill(a.region, 4, 4 * MIB), None
        b.region.memory[4 * MIB :] = second = bytes(range(256)) * (4 * MIB // 256)
        await asyncio.gather(
            a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, 4 * MIB)]),
            b.engine.submit("a", Op.WRITE, "kv-b", "kv-a", [(4 * MIB, 4 * MIB, 4 * MIB)]),
        )
        assert bytes(b.region.memory[: 4 * MIB]) == first
        assert bytes(a.region.memory[4 * MIB :]) == second


async def test_an_unknown_region_and_a_wrong_offset_are_refused_and_the_rails_stay():
    async with two_nodes() as (a, b):
        with pytest.raises(TransferError, match="not registered"):
            await a.engine.submit("b", Op.WRITE, "kv-a", "other", [(0, 0, 8)])
        with pytest.raises(TransferError, match="outside"):
            await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, SIZE - 4, 8)])
        sent = fill(a.region, 5, 4096)
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, 4096)])
        assert bytes(b.region.memory[:4096]) == sent


async def test_the_key_of_a_withdrawn_region_is_dead():
    """The fence of memory that is used for something else: a late writer is refused by the card."""
    async with two_nodes(rails=1) as (a, b):
        extra = Region.private("extra", MIB)
        b.engine.register(extra)
        await a.engine.submit("b", Op.WRITE, "kv-a", "extra", [(0, 0, MIB)])
        link = a.engine._transports["rdma"]._peers["b"]
        stale = link._regions["extra"]
        b.engine.unregister("extra")
        await until(lambda: "extra" not in link._regions)
        fill(a.region, 6, MIB)
        link._regions["extra"] = stale  # a writer that has not heard of it
        with pytest.raises(TransferError, match="refused"):
            await a.engine.submit("b", Op.WRITE, "kv-a", "extra", [(0, 0, MIB)])
        assert not any(extra.memory)
        assert "extra" not in link._regions, "the next transfer asks for its key again"
        await until(lambda: link.rails[0].up)
        sent = fill(a.region, 7, MIB)
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, MIB)])
        assert bytes(b.region.memory[:MIB]) == sent
        extra.close()


async def test_cancelling_leaves_nothing_moving():
    async with two_nodes() as (a, b):
        await a.engine.open("b")
        fill(a.region, 8)
        task = asyncio.create_task(a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = bytes(b.region.memory)
        await asyncio.sleep(0.5)
        assert bytes(b.region.memory) == before
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)])
        assert bytes(b.region.memory) == bytes(a.region.memory)


@pytest.mark.parametrize("op", Op)
async def test_a_lossy_rail_delivers(op):
    async with two_nodes() as (a, b):
        await a.engine.open("b")
        source, target = (a, b) if op is Op.WRITE else (b, a)
        sent = fill(source.region, 9)
        sh("tc qdisc add dev va0 root netem loss 1%; tc qdisc add dev vb0 root netem loss 1%")
        try:
            await a.engine.submit("b", op, "kv-a", "kv-b", [(0, 0, SIZE)], timeout_s=500)
        finally:
            sh("tc qdisc del dev va0 root; tc qdisc del dev vb0 root")
        assert bytes(target.region.memory) == sent
        assert all(rail.moved for rail in rails_of(a, "b"))
        await until(lambda: all(rail.up for rail in rails_of(a, "b")))  # one may have broken, and comes back


@pytest.mark.parametrize("op", Op)
async def test_a_link_down_midway_goes_on_over_the_other_rail_and_comes_back(op):
    async with two_nodes() as (a, b):
        await a.engine.open("b")
        source, target = (a, b) if op is Op.WRITE else (b, a)
        sent = fill(source.region, 10)
        task = asyncio.create_task(a.engine.submit("b", op, "kv-a", "kv-b", [(0, 0, SIZE)], timeout_s=500))
        first, second = rails_of(a, "b")
        await until(lambda: first.moved > 0 or task.done())
        sh("ip link set vb0 down")
        await task
        assert bytes(target.region.memory) == sent
        await until(lambda: not first.up)
        assert second.moved
        sh(
            "ip link set vb0 up;"
            "ip neigh replace 10.77.0.1 lladdr $(cat /sys/class/net/va0/address) dev vb0 nud permanent;"
            "ip neigh replace 10.77.0.2 lladdr $(cat /sys/class/net/vb0/address) dev va0 nud permanent"
        )
        await until(lambda: first.up and second.up)
        moved, other = first.moved, second.moved
        again = fill(source.region, 11)
        await a.engine.submit("b", op, "kv-a", "kv-b", [(0, 0, SIZE)], timeout_s=500)
        assert bytes(target.region.memory) == again
        assert first.moved > moved and second.moved > other
        rows = {row["rail"]: row for row in a.engine.snapshot()[0]["rails"]}
        assert rows["rxa0"]["failures"] >= 1 and a.engine.bandwidth("b").keys() == {"rxa0", "rxa1"}


async def test_the_rails_of_one_number_are_joined_and_far_ones_wait():
    """Topology files turn the rails round; on one side the first of them is alone near the memory."""
    turned = {
        "a": Overrides(rails={"rxa1": 0, "rxa0": 1}, numa={"rxa0": 0, "rxa1": 1}),
        "b": Overrides(rails={"rxb1": 0, "rxb0": 1}),
    }
    async with two_nodes(overrides=turned) as (a, b):
        a.region.place = "numa:1"
        sent = fill(a.region, 20)
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)])
        assert bytes(b.region.memory) == sent
        assert a.engine.path_of("b").reason == "RDMA over rxa1, rxa0"
        assert a.engine.regions()["kv-a"]["nics"] == ["rxa1"]
        near, far = rails_of(a, "b")
        assert (near.name, near.moved, far.moved) == ("rxa1", SIZE, 0)


async def test_losing_the_peer_fails_what_is_under_way():
    async with two_nodes() as (a, b):
        await a.engine.open("b")
        fill(a.region, 12)
        task = asyncio.create_task(a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)]))
        await asyncio.sleep(0.01)
        b.channel.drop("a", "the test says so")
        with pytest.raises(PeerLost):
            await task
        await b.engine.fence("a")
        before = bytes(b.region.memory)
        await asyncio.sleep(0.3)
        assert bytes(b.region.memory) == before
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)], timeout_s=60)
        assert bytes(b.region.memory) == bytes(a.region.memory)

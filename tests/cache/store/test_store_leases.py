"""What the pooled store holds for others: slots until blocks are committed, pins until readers have them."""

import asyncio

import pytest

from net.errors import RemoteError
from tests.cache.pooled import QUICK, cluster_of, get, key_of, lookup, of_home, put, quiet


async def test_a_block_not_yet_committed_is_a_miss():
    async with cluster_of("a", "b") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        putting = asyncio.create_task(put(a, range(10)))
        await transfer.started.wait()
        assert await lookup(b, range(10)) == 0
        assert (await get(b, range(10))).blocks == 0
        transfer.gate.set()
        assert await putting == 10
        assert (await get(b, range(10))).blocks == 10


async def cancelled(cluster, use):
    """Cancel a get or put of node a in the middle of its first transfer."""
    transfer = cluster.hub.transfers["a"]
    transfer.gate.clear()
    transfer.started.clear()
    using = asyncio.create_task(use)
    await transfer.started.wait()
    cluster.hub.calls.clear()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    transfer.gate.set()


@pytest.mark.parametrize("use", [get, put])
async def test_a_cancelled_call_gives_its_leases_back(use):
    async with cluster_of("a", "b") as cluster:
        a, b, numbers = cluster.stores["a"], cluster.stores["b"], of_home(cluster, "b", 5)
        if use is get:
            await put(a, numbers)
        a._window = 1
        await cancelled(cluster, use(a, numbers))
        assert [kind for _, _, kind in cluster.hub.calls] == ["store.unpin"], "the later windows are not begun"
        await quiet(b)
        assert b.stats()["share"]["leases_expired"] == 0
        assert await put(a, numbers) == (0 if use is get else 5)


async def test_a_lease_that_is_ended_before_its_grant_is_given_back():
    async with cluster_of("a") as cluster:
        b = await cluster.add("b", slots=1)
        (number,) = of_home(cluster, "b", 1)
        entered, go = asyncio.Event(), asyncio.Event()
        wait_for_room = b.local.wait_for_room

        async def slow_room(timeout_s, facts):
            entered.set()
            await go.wait()
            b.local.reservations.abandon(blocker)
            return await wait_for_room(timeout_s, facts)

        b.local.wait_for_room = slow_room
        blocker = b.local.reservations.reserve(key_of(10**6))
        channel = cluster.hub.channels["a"]
        reserving = asyncio.create_task(channel.call("b", "store.reserve", {"lease": 7}, [key_of(number)]))
        await entered.wait()
        channel.post("b", "store.unpin", {"lease": 7})
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(RemoteError, match="ended before its grant"):
            await reserving
        assert b.local.stats()["dram"]["reserved"] == 0
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 0} == b.stats()["share"]


async def test_a_pinned_block_is_not_evicted_under_a_reader():
    async with cluster_of() as cluster:
        a, b = await cluster.add("a", slots=0), await cluster.add("b", slots=4)
        numbers = of_home(cluster, "b", 12)
        await put(a, numbers[:4])
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        transfer.started.clear()
        getting = asyncio.create_task(get(a, numbers[:4]))
        await transfer.started.wait()
        assert await put(b, numbers[4:]) == 0
        assert b.stats()["put_no_room"] == 8
        transfer.gate.set()
        assert (await getting).blocks == 4
        assert await put(b, numbers[4:]) > 0


async def test_windows_bound_what_is_leased_at_once():
    async with cluster_of("a", "b") as cluster:
        a = cluster.stores["a"]
        a._window = 3
        assert await put(a, range(40)) == 40
        assert (await get(a, range(40))).blocks == 40


async def reserve_and_pin(cluster, reserved, pinned):
    """Node a takes leases on b and never gives them back."""
    call = cluster.hub.channels["a"].call
    await call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
    reply, _ = await call("b", "store.pin", {"lease": 2}, [key_of(pinned)])
    assert len(reply["slots"]) == 1


async def test_leases_end_at_their_deadline():
    """The peer may still be writing to what it reserved: it is cut off first."""
    async with cluster_of("a", "b", deadlines=QUICK) as cluster:
        b = cluster.stores["b"]
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        await quiet(b)
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 2} == b.stats()["share"]
        assert cluster.hub.dropped == [("b", "a")]
        assert await put(b, [reserved]) == 1


async def test_a_peer_that_pins_too_long_is_not_cut_off():
    async with cluster_of("a", "b", deadlines=QUICK) as cluster:
        b = cluster.stores["b"]
        (pinned,) = of_home(cluster, "b", 1)
        await put(b, [pinned])
        await cluster.hub.channels["a"].call("b", "store.pin", {"lease": 1}, [key_of(pinned)])
        await quiet(b)
        assert b.stats()["share"]["leases_expired"] == 1
        assert cluster.hub.dropped == []


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_leases_of_a_peer_that_is_gone_are_given_back(how):
    """Pins at once; a reservation when the transfer engine says that nothing can land there any more."""
    async with cluster_of("a", "b") as cluster:
        b, fence = cluster.stores["b"], cluster.hub.transfers["b"].fence_gate
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        assert b.stats()["share"]["leases"] == 2
        fence.clear()
        for callback in getattr(cluster.hub.channels["b"], f"{how}_callbacks"):
            callback("a")
        assert b.stats()["share"] | {"leases": 1, "leases_expired": 2} == b.stats()["share"]
        assert b.local.stats()["dram"]["reserved"] == b.local.stats()["dram"]["held"] == 1
        fence.set()
        await quiet(b)
        assert await put(b, [reserved]) == 1


async def test_slots_behind_a_fence_that_times_out_stay_held(caplog):
    async with cluster_of("a", "b") as cluster:
        b, transfer = cluster.stores["b"], cluster.hub.transfers["b"]
        (reserved,) = of_home(cluster, "b", 1)
        await cluster.hub.channels["a"].call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
        failures = iter([TimeoutError("still writing"), TimeoutError("still writing")])

        async def fence(peer_id):
            for failure in failures:
                assert b.local.stats()["dram"]["reserved"] == 1
                raise failure

        transfer.fence = fence
        cluster.hub.kill("a")
        await quiet(b)
        assert caplog.text.count("are still held") == 2


async def test_closing_does_not_wait_for_a_fence():
    async with cluster_of("a", "b") as cluster:
        b = cluster.stores["b"]
        (reserved,) = of_home(cluster, "b", 1)
        await cluster.hub.channels["a"].call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
        cluster.hub.transfers["b"].fence_gate.clear()
        cluster.hub.lose("b", "a")
        await asyncio.sleep(0)
        await b.close()
        assert b.local.stats()["dram"]["held"] == 0


async def test_only_the_owner_ends_a_lease():
    async with cluster_of("a", "b", "c") as cluster:
        a, c, b = cluster.hub.channels["a"], cluster.hub.channels["c"], cluster.stores["b"]
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        await c.call("b", "store.unpin", {"lease": 2})
        assert b.stats()["share"]["leases"] == 2
        with pytest.raises(RemoteError, match="expired"):
            await c.call("b", "store.commit", {"lease": 1, "checksums": [1]})
        assert b.local.contains(key_of(reserved)) is None
        with pytest.raises(RemoteError, match="in use"):
            await a.call("b", "store.pin", {"lease": 2}, [key_of(pinned)])
        await a.call("b", "store.unpin", {"lease": 1})
        await a.call("b", "store.unpin", {"lease": 2})
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 0} == b.stats()["share"]


async def test_bad_messages_are_refused_and_leak_nothing():
    async with cluster_of("a", "b") as cluster:
        call = cluster.hub.channels["a"].call
        with pytest.raises(RemoteError, match="not block keys"):
            await call("b", "store.pin", {"lease": 1}, [b"short"])
        await call("b", "store.reserve", {"lease": 1}, [key_of(1)])
        with pytest.raises(RemoteError, match="not one checksum, and one length if any, for each of 1 slots"):
            await call("b", "store.commit", {"lease": 1, "checksums": [1, 2]})
        assert cluster.stores["b"].local.stats()["dram"]["held"] == 0

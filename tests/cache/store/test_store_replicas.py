"""Replicas, fail-over, hand-off, repair and removal, on the in-memory network of fakes.py."""

import asyncio
import errno
import os
from contextlib import suppress

import pytest

from cache.arena import checksum
from cache.homes.rendezvous import equal_members, homes
from cache.protocol import Deadlines
from cache.results import NoRoom, Unreachable
from cache.ssd import tier
from cache.store import keeper
from cache.tiers.local_store import NoSpace
from net.errors import RemoteError
from net.transfer.engine import BULK, REPAIR
from tests.cache.pooled import SLOT, block_of, cluster_of, get, home_of, key_of, lookup, of_home, put, until

SOON = Deadlines(lookup_s=0.1, control_s=0.2, transfer_s=0.2, room_s=0.05, shun_s=30)


def holders(cluster, i):
    return {n for n, store in cluster.stores.items() if store.local is not None and store.local.contains(key_of(i))}


@pytest.fixture(params=[0, SLOT], ids=["leases", "messages"])
def way(request):
    """How blocks travel: through leases and transfers, or, small ones, in the messages themselves."""
    return {"message_block_bytes": request.param}


async def test_every_block_has_its_replicas(way):
    async with cluster_of("a", "b", "c", replicas=2, **way) as cluster:
        assert await put(cluster.stores["a"], range(30)) == 30
        members = equal_members("abc")
        assert all(holders(cluster, i) == set(homes(key_of(i), members, 2)) for i in range(30))
        assert await put(cluster.stores["b"], range(30)) == 0
        assert (await get(cluster.stores["c"], range(30))).blocks == 30


async def test_with_two_replicas_a_dead_home_is_no_miss(way):
    async with cluster_of("a", "b", "c", replicas=2, **way) as cluster:
        a = cluster.stores["a"]
        await put(a, range(30))
        cluster.hub.kill("c")
        assert await lookup(a, range(30)) == 30
        assert (await get(a, range(30))).blocks == 30
        assert await put(a, range(100, 130)) == 30
        assert (await get(a, range(100, 130))).blocks == 30


async def test_a_home_that_dies_in_the_middle_of_a_read_is_replaced_within_the_call():
    async with cluster_of("a", "b", "c", replicas=2) as cluster:
        a = cluster.stores["a"]
        numbers = [i for i in range(200) if set(homes(key_of(i), equal_members("abc"), 2)) == {"b", "c"}][:8]
        await put(a, numbers)
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        transfer.started.clear()
        getting = asyncio.create_task(get(a, numbers))
        await transfer.started.wait()
        cluster.hub.kill("b")
        transfer.gate.set()
        result = await getting
        assert (result.blocks, result.sources) == (8, {"c": 8})


ENDLESS = Deadlines(lookup_s=1e4, control_s=1e4, transfer_s=1e4)  # a test that waited for one of these would not end


@pytest.mark.parametrize("fault", ["hanging", "stalled"])
async def test_a_home_that_does_not_answer_is_given_up_for_its_replica_within_the_call(way, fault):
    """What it does not do is say a word (`hanging`), or move a byte where blocks move through leases (`stalled`)."""
    async with cluster_of("a", "b", "c", replicas=2, deadlines=ENDLESS, **way) as cluster:
        a = cluster.stores["a"]
        numbers = [i for i in range(200) if set(homes(key_of(i), equal_members("abc"), 2)) == {"b", "c"}][:8]
        await put(a, numbers)
        getattr(cluster.hub, fault).add("c")
        a.router.paces.started("b", 1 << 40)  # c should be done first
        assert await lookup(a, numbers) == 8
        result = await get(a, numbers)
        assert result.blocks == 8
        if fault == "hanging" or not way["message_block_bytes"]:
            assert result.sources == {"b": 8}
            assert a.stats()["given_up"]
        getattr(cluster.hub, fault).clear()


async def test_who_was_given_up_is_asked_again_when_nobody_else_has_it(way):
    async with cluster_of("a", "b", "c", replicas=2, deadlines=ENDLESS, **way) as cluster:
        a, hub = cluster.stores["a"], cluster.hub
        i = next(i for i in range(200) if set(homes(key_of(i), equal_members("abc"), 2)) == {"b", "c"})
        await put(a, [i])
        await cluster.stores["b"].local.remove([key_of(i)])
        hub.hanging.add("c")
        a.router.paces.started("b", 1 << 40)
        hub.calls.clear()
        getting = asyncio.create_task(get(a, [i]))
        await until(lambda: ("a", "c") in {call[:2] for call in hub.calls})
        hub.hanging.clear()
        assert (await getting).sources == {"c": 1}


async def test_a_block_evicted_at_one_replica_is_read_from_the_other(way):
    async with cluster_of("a", "b", "c", replicas=2, **way) as cluster:
        a = cluster.stores["a"]
        await put(a, range(20))
        for i in range(0, 20, 3):
            await cluster.stores[home_of(cluster, i)].local.remove([key_of(i)])
        assert await lookup(a, range(20)) == 20
        assert (await get(a, range(20))).blocks == 20


async def test_a_full_home_passes_on_and_gets_its_blocks_back(way):
    async with cluster_of("a", "b", **way) as cluster:
        small = await cluster.add("s", slots=2, deadlines=SOON, **way)
        a = cluster.stores["a"]
        numbers = of_home(cluster, "s", 6)
        blockers = [small.local.reservations.reserve(key_of(10**6 + i)) for i in range(2)]
        assert await put(a, numbers) == 6
        assert await lookup(a, numbers) == 6, "the home says where they went"
        assert (await get(a, numbers)).blocks == 6
        assert sum(cluster.stores[n].stats()["share"]["hints"] for n in "ab") == 6
        for slot in blockers:
            small.local.reservations.abandon(slot)
        for name in "ab":
            cluster.stores[name].keeper.start()
        await until(lambda: sum(cluster.stores[n].stats()["share"]["hints"] for n in "ab") == 0)
        assert sum("s" in holders(cluster, i) for i in numbers) == 2, "as many as it can hold"


async def test_blocks_that_a_home_has_passed_on_are_not_pinned_together():
    """It leases those that it has, and says where the others may be: not in one of its slots."""
    async with cluster_of("a", "b") as cluster:
        small = await cluster.add("s", slots=2, deadlines=SOON)
        a = cluster.stores["a"]
        here, *passed_on = of_home(cluster, "s", 3)
        assert await put(a, [here]) == 1
        blocker = small.local.reservations.reserve(key_of(10**6))
        (pin,) = await small.local.pinning.pin_each([key_of(here)])
        assert await put(a, passed_on) == 2
        small.local.pinning.unpin([pin.slot])
        for numbers in ([here, *passed_on], passed_on):
            keys = [key_of(i) for i in numbers]
            assert await a.lookup(keys) == len(keys)
            async with a.pinned(keys) as pinned:
                assert pinned is None
            assert (await get(a, numbers)).blocks == len(keys)
        async with a.pinned([key_of(here)]) as pinned:
            assert pinned.sources == {"s": 1}
        small.local.reservations.abandon(blocker)


async def test_a_newcomer_gets_its_share_while_reads_go_on(way):
    async with cluster_of("a", "b", **way) as cluster:
        a = cluster.stores["a"]
        await put(a, range(60))
        for name in "ab":
            cluster.stores[name].keeper.start()
        await until(lambda: all(cluster.stores[n].keeper._before for n in "ab"))
        await cluster.add("c", **way)
        numbers = of_home(cluster, "c", 60)
        mine = [i for i in numbers if i < 60]
        assert mine
        assert (await get(a, range(60))).blocks == 60, "from their former homes"
        await until(lambda: all("c" in holders(cluster, i) for i in mine))
        assert (await get(a, mine)).sources == {"c": len(mine)}
        moved = sum(cluster.stores[n].stats()["repair"]["moved"] for n in "ab")
        assert moved == len(mine), "nothing else moves"


def broken(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def take_all_slots(store):
    """Returns a function that gives them back."""
    reservations, taken = store.local.reservations, []
    with suppress(NoSpace):
        while True:
            taken.append(reservations.lend())
    return lambda: [reservations.take_back(slot) for slot in taken]


@pytest.mark.parametrize("trouble", ["no slot here", "no read here", "no room there"])
async def test_what_cannot_move_to_a_newcomer_now_moves_later(tmp_path, monkeypatch, trouble):
    """It was offered once, and then only after the next change of members."""
    monkeypatch.setattr(keeper, "RETRY_S", 0.05)
    monkeypatch.setattr(tier, "TEND_S", 0.05)
    deadlines = Deadlines(room_s=0.05)
    async with cluster_of() as cluster:
        a = await cluster.add("a", slots=8, directory=tmp_path, deadlines=deadlines)
        for i in range(30):
            await a.put(key_of(i), block_of(i))
            await a.local.drain()
        a.keeper.start()
        await until(lambda: a.keeper._before)
        end = None
        with monkeypatch.context() as patch:
            if trouble == "no read here":
                patch.setattr(a.local.ssd._medium, "read", broken)
            elif trouble == "no slot here":
                end = take_all_slots(a)
            b = await cluster.add("b", deadlines=deadlines)
            if trouble == "no room there":
                end = take_all_slots(b)
            await until(lambda: "b" in a.keeper._rest_until)
        if end is not None:
            end()
        theirs = [i for i in range(30) if home_of(cluster, i) == "b"]
        await until(lambda: all("b" in holders(cluster, i) for i in theirs))
        await until(lambda: not a.keeper.stats()["owed"])


async def test_a_leaving_node_tries_again_while_there_is_no_room(monkeypatch):
    monkeypatch.setattr(keeper, "RETRY_S", 0.05)
    async with cluster_of("a", "b", deadlines=Deadlines(room_s=0.05)) as cluster:
        a, b = (cluster.stores[name] for name in "ab")
        numbers = of_home(cluster, "a", 8)
        await put(a, numbers)
        end = take_all_slots(b)
        leaving = asyncio.create_task(a.keeper.leave(60))
        await until(lambda: "b" in a.keeper._rest_until)
        end()
        await leaving
        assert all("b" in holders(cluster, i) for i in numbers)


async def test_after_a_loss_the_survivors_make_new_replicas(way):
    async with cluster_of("a", "b", "c", replicas=2, **way) as cluster:
        await put(cluster.stores["a"], range(40))
        for name in "ab":
            cluster.stores[name].keeper.start()
        await until(lambda: all(cluster.stores[n].keeper._before for n in "ab"))
        cluster.hub.kill("c")
        cluster.members.remove("c")
        await until(lambda: all({"a", "b"} <= holders(cluster, i) for i in range(40)))


async def test_a_node_that_is_back_before_its_loss_is_noticed_gets_its_replicas(way):
    """Its name and its share are the same, so the members never change."""
    async with cluster_of("a", "b", "c", replicas=2, **way) as cluster:
        await put(cluster.stores["a"], range(40))
        theirs = [i for i in range(40) if "c" in holders(cluster, i)]
        for name in "abc":
            cluster.stores[name].keeper.start()
        await until(lambda: all(cluster.stores[n].keeper._before for n in "abc"))
        await cluster.stores.pop("c").close()
        cluster.members.remove("c")
        again = await cluster.add("c", replicas=2, **way)
        again.keeper.start()
        for name in "ab":
            cluster.stores[name].keeper.lost("c")
        await until(lambda: all("c" in holders(cluster, i) for i in theirs))
        assert sum("c" in holders(cluster, i) for i in range(40)) == len(theirs)


async def test_a_leaving_node_hands_over_what_it_has(way):
    async with cluster_of("a", "b", "c", **way) as cluster:
        await put(cluster.stores["a"], range(40))
        await cluster.stores["c"].keeper.leave(10)
        cluster.hub.kill("c")
        cluster.members.remove("c")
        assert (await get(cluster.stores["a"], range(40))).blocks == 40


async def test_a_node_that_was_away_offers_what_it_finds_on_its_disk(tmp_path, way):
    async with cluster_of(**way) as cluster:
        alone = await cluster.add("b", directory=tmp_path, **way)
        assert await put(alone, range(20)) == 20
        await alone.close()
        cluster.members.clear()
        a, b = await cluster.add("a", **way), await cluster.add("b", directory=tmp_path, **way)
        b.keeper.start()
        away = of_home(cluster, "a", 20)
        mine = [i for i in away if i < 20]
        await until(lambda: all("a" in holders(cluster, i) for i in mine))
        assert (await get(a, range(20))).blocks == 20


async def test_a_hot_block_gets_more_replicas_and_readers_use_them(way):
    async with cluster_of("a", "b", "c", **way) as cluster:
        a = cluster.stores["a"]
        (i,) = of_home(cluster, "b", 1)
        await put(a, [i])
        for _ in range(300):
            assert (await get(a, [i])).blocks == 1
        for name in "abc":  # now that all reads have been counted at one home
            cluster.stores[name].keeper.start()
        await until(lambda: holders(cluster, i) == {"a", "b", "c"})
        assert (await get(a, [i])).blocks == 1
        now = asyncio.get_running_loop().time()
        assert set(a.router.replicas_of(now, key_of(i))) == {"a", "b", "c"}
        cluster.hub.kill("b")
        for _ in range(4):
            assert (await get(a, [i])).blocks == 1, "its home is not needed any more"


async def test_the_bytes_of_repairs_let_all_others_pass():
    async with cluster_of("a", "b", "c", replicas=2) as cluster:
        await put(cluster.stores["a"], range(40))
        for name in "ab":
            cluster.stores[name].keeper.start()
        await until(lambda: all(cluster.stores[n].keeper._before for n in "ab"))
        assert cluster.hub.transfers["b"].priorities == set()
        cluster.hub.kill("c")
        cluster.members.remove("c")
        await until(lambda: all({"a", "b"} <= holders(cluster, i) for i in range(40)))
        assert cluster.hub.transfers["b"].priorities == {REPAIR}


async def test_copies_that_relieve_a_home_and_those_of_a_leaving_one_do_not():
    async with cluster_of("client", slots=0) as cluster:
        client, (first, second) = cluster.stores["client"], [await cluster.add(name) for name in "ab"]
        (i,) = of_home(cluster, "a", 1)
        await put(client, [i])
        for _ in range(300):
            assert (await get(client, [i])).blocks == 1
        first.keeper.start()
        await until(lambda: holders(cluster, i) == {"a", "b"})
        assert cluster.hub.transfers["a"].priorities == {BULK}
        await put(client, range(100, 130))
        await second.keeper.leave(10)
        assert cluster.hub.transfers["b"].priorities == {BULK}


async def test_values_are_bytes_or_missing(way):
    async with cluster_of("a", "b", **way) as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        items = [(key_of(i), block_of(i)[: 1 + 97 * i]) for i in range(30)]
        assert await a.put_many(items) == [True] * 30
        assert await b.get_many([key for key, _ in items]) == [value for _, value in items]
        assert await b.get(key_of(99)) is None
        assert await b.get_many([key_of(99), key_of(3)]) == [None, block_of(3)[:292]]
        assert await b.exists_many([key_of(99), key_of(3)]) == [False, True]
        assert not await a.put(key_of(3), b"other"), "the first value stays"
        assert await b.get(key_of(3)) == block_of(3)[:292]
        for wrong in (b"", bytes(SLOT + 1)):
            with pytest.raises(ValueError, match=f"1 to {SLOT} bytes"):
                await a.put(key_of(100), wrong)


async def test_only_blocks_that_do_not_fill_their_slots_have_a_length(way):
    async with cluster_of("client", slots=0, **way) as cluster:
        client, _ = cluster.stores["client"], await cluster.add("home", **way)
        sizes = [SLOT, 100, SLOT, SLOT - 1]
        assert all(await client.put_many([(key_of(i), block_of(i)[:size]) for i, size in enumerate(sizes)]))
        offsets = [at * SLOT for at in range(len(sizes))]
        result = await client.get_into([key_of(i) for i in range(len(sizes))], "kv", offsets)
        assert (result.blocks, result.lengths) == (len(sizes), {1: 100, 3: SLOT - 1})
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert client.kv.memory[offset : offset + size] == block_of(i)[:size]


async def test_a_short_block_that_did_not_arrive_says_nothing_of_a_whole_one_elsewhere():
    async with cluster_of("client", slots=0, replicas=2) as cluster:
        client, nodes = cluster.stores["client"], [await cluster.add(name, replicas=2) for name in "bc"]
        key, whole = key_of(1), block_of(1)
        for home, value in zip(nodes, (whole[:100], whole), strict=True):
            slot = home.local.reservations.reserve(key)
            home.local.arena.memory(slot)[: len(value)] = value
            home.local.commit(key, slot, checksum(value), len(value))
        short = nodes[0].local
        short.arena.memory(short._pool.lookup(key))[50] ^= 1
        client.router.paces.started("c", 1 << 40)  # b is asked first
        result = await client.get_into([key], "kv", [0])
        assert (result.blocks, result.sources, result.lengths) == (1, {"c": 1}, {})
        assert client.kv.memory[:SLOT] == whole and client.stats()["corrupt"] == 1


async def test_removed_is_missing_everywhere(tmp_path, way):
    async with cluster_of(replicas=2, **way) as cluster:
        for name in "ab":
            await cluster.add(name, directory=tmp_path / name, replicas=2, **way)
        a = cluster.stores["a"]
        await a.put(key_of(1), b"one")
        await a.flush()
        assert await a.remove(key_of(1))
        assert not await a.exists(key_of(1))
        assert not await a.remove(key_of(1))
        assert await a.put(key_of(1), b"two")
        assert await cluster.stores["b"].get(key_of(1)) == b"two"


async def test_short_values_survive_the_disk(tmp_path, way):
    async with cluster_of("client", slots=0, **way) as cluster:
        client = cluster.stores["client"]
        await cluster.add("b", slots=4, directory=tmp_path, **way)
        values = {key_of(i): block_of(i)[: 1 + 50 * i] for i in range(40)}
        assert all(await client.put_many(list(values.items())))
        assert await client.get_many(list(values)) == list(values.values())


async def test_put_says_why_it_failed(way):
    async with cluster_of("client", slots=0, **way) as cluster:
        client = cluster.stores["client"]
        with pytest.raises(Unreachable):
            await client.put(key_of(1), b"x")
        full = await cluster.add("b", slots=1, deadlines=SOON, **way)
        full.local.reservations.reserve(key_of(2))
        with pytest.raises(NoRoom, match="--dram-bytes"):
            await client.put(key_of(1), b"x")
        full.local.reservations.abandon(0)


async def test_a_long_prefix_arrives_in_parts(way):
    async with cluster_of("a", "b", **way) as cluster:
        a = cluster.stores["a"]
        a._window = 4
        await put(a, range(30))
        offsets = [at * SLOT for at in range(40)]
        runs = [result.blocks async for result in a.stream_into([key_of(i) for i in range(40)], "kv", offsets)]
        assert runs[0] == max(runs) == 8, "four blocks at each home"
        assert sum(runs) == 30
        assert all(a.kv.memory[at * SLOT : (at + 1) * SLOT] == block_of(at) for at in range(30))


async def test_a_small_block_damaged_at_home_is_dropped_there():
    async with cluster_of("a", "b", message_block_bytes=SLOT) as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        numbers = of_home(cluster, "b", 6)
        await put(a, numbers)
        b.local.arena.memory(b.local._pool.lookup(key_of(numbers[3])))[100] ^= 1
        assert (await get(a, numbers)).blocks == 3
        assert a.stats()["corrupt"] == 1
        await until(lambda: b.local.contains(key_of(numbers[3])) is None)
        assert await put(a, numbers) == 1
        assert (await get(a, numbers)).transports == {"message": 6}


async def test_small_blocks_that_do_not_fit_their_description_are_refused():
    async with cluster_of("a", "b", message_block_bytes=SLOT) as cluster:
        call, b = cluster.hub.channels["a"].call, cluster.stores["b"]
        for lengths, data, reason in (([9], b"short", "not 1 keys"), ([SLOT + 1], bytes(SLOT + 1), "slots have")):
            with pytest.raises(RemoteError, match=reason):
                await call("b", "store.write", {"lengths": lengths, "checksums": [1]}, [key_of(1), data])
        assert b.local.stats()["dram"]["reserved"] == b.local.stats()["dram"]["blocks"] == 0

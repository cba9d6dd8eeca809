"""Atomics and errors over real verbs."""

import asyncio
import json
import os
import random
import signal
import sys
import time

import pytest

from net.channel.channel import Channel
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable
from net.transfer.engine import Op, PeerLost, TransferEngine, TransferError
from net.transfer.rdma.device import Device, registered
from net.transfer.rdma.queue_pair import QueuePair, WorkRequest
from net.transfer.rdma.verbs import verbs
from tests.rdma.nodes import SIZE, fill, rails_of, two_nodes, until


def link_of(node, peer):
    return node.engine._transports["rdma"].link(peer)


async def test_what_a_submission_has_landed_is_known():
    async with two_nodes() as (a, _):
        landed, spans = LandedSpans(), [(0, 0, SIZE // 2), (SIZE // 2, SIZE - 8, 8)]
        await a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", spans, landed=landed)
        assert landed.of(spans) == [True, True]


async def test_atomics_from_both_sides_of_a_counter():
    async with two_nodes() as (a, b):
        await a.engine.open("b")
        await b.engine.open("b")
        b.region.memory[64:72] = (5).to_bytes(8, "little")
        olds = await asyncio.gather(*(link_of(a, "b").fetch_add("kv-b", 64, 3) for _ in range(10)))
        assert sorted(olds) == [5 + 3 * i for i in range(10)]
        assert await link_of(a, "b").fetch_add("kv-b", 64, -35) == 35
        assert int.from_bytes(b.region.memory[64:72], "little") == 0
        with pytest.raises(TransferError, match="outside"):
            await link_of(a, "b").fetch_add("kv-b", SIZE - 4, 1)


async def pair_of(device, **kinds):
    """Two queue pairs of one device, connected; (first, what happened to it)."""
    log = {"done": [], "error": []}
    first = QueuePair(
        device, log["done"].extend, lambda items, why, refused: log["error"].append((items, why, refused))
    )
    second = QueuePair(device, lambda items: None, lambda *error: None)
    first.connect(second.endpoint(), **kinds)
    second.connect(first.endpoint())
    return first, second, log


async def test_errors_end_a_queue_pair_and_a_new_generation_works():
    device = Device("rxe0")
    region = Region.private("r", 1 << 16)
    known = device.register(region)
    lib = verbs().lib
    first, second, log = await pair_of(device)

    def write(item, remote=known.address, rkey=known.rkey, lkey=known.lkey, length=64):
        return WorkRequest(lib.IBV_WR_RDMA_WRITE, known.address, lkey, remote, rkey, length, item)

    wrong = {
        "a wrong key": write("x", rkey=known.rkey ^ 0x5A5A),
        "beyond the region": write("x", remote=known.address + (1 << 16) - 8),
        "a wrong local key": write("x", lkey=known.lkey ^ 0x5A5A),
    }
    for name, request in wrong.items():
        first.post([write("before"), request, write("behind")])
        await until(lambda: log["error"])
        items, why, _ = log["error"].pop()
        assert items[0] in ("x", "before") and items[-1] == "behind", (name, items, why)
        assert not first.ready and first.room == 0
        first.reset()
        second.reset()
        first.connect(second.endpoint())
        second.connect(first.endpoint())
        log["done"].clear()
        first.post([write("again")])
        await until(lambda: log["done"] == ["again"])
    first.close()
    second.close()
    device.close()
    region.close()


async def test_a_closed_other_end_is_noticed():
    device = Device("rxe0")
    region = Region.private("r", 4096)
    known = device.register(region)
    first, second, log = await pair_of(device, ack_timeout=10, retries=3)
    second.close()
    first.post(
        [WorkRequest(verbs().lib.IBV_WR_RDMA_WRITE, known.address, known.lkey, known.address, known.rkey, 8, "x")]
    )
    await until(lambda: log["error"])
    assert log["error"][0][0] == ["x"]
    first.close()
    device.close()
    region.close()


async def test_registered_memory_keeps_its_size_and_place():
    device = Device("rxe0")
    region = Region.private("r", 8192)
    known = device.register(region)
    assert device.register(region) is known, "once"
    with pytest.raises(BufferError):
        region._mapping.resize(4096)
    assert region.address == known.address
    device.deregister("r")
    device.deregister("r")
    again = device.register(region)
    assert again.rkey != known.rkey, "a late writer with the old key is refused"
    device.close()
    region.close()


async def test_more_requests_than_there_is_room_for_are_refused_before_the_card_sees_them():
    device = Device("rxe0")
    region = Region.private("r", 4096)
    known = device.register(region)
    first, second, log = await pair_of(device)
    room = first.room
    write = verbs().lib.IBV_WR_RDMA_WRITE
    requests = [WorkRequest(write, known.address, known.lkey, known.address, known.rkey, 8, i) for i in range(room + 1)]
    with pytest.raises(ValueError, match="do not fit"):
        first.post(requests)
    first.post(requests[:room])
    assert first.room == 0
    await until(lambda: len(log["done"]) == room)
    assert first.room == room and not log["error"]
    for pair in (first, second):
        pair.close()
    device.close()
    region.close()


async def test_queue_pairs_whose_completions_do_not_fit_into_one_queue_share_several(monkeypatch):
    """Nobody polls while all of them complete everything that they can have under way: nothing overflows."""
    monkeypatch.setattr("net.transfer.rdma.card.COMPLETIONS", 300)
    device = Device("rxe0")
    region = Region.private("r", 4096)
    known = device.register(region)
    made = [await pair_of(device) for _ in range(3)]
    assert len(device._cqs) > 1
    write = verbs().lib.IBV_WR_RDMA_WRITE
    for first, _, _ in made:
        for i in range(first.room):  # one by one: each is signalled, and leaves a completion
            first.post([WorkRequest(write, known.address, known.lkey, known.address, known.rkey, 8, i)])
    time.sleep(0.5)  # noqa: ASYNC251  the loop, which would poll, stands still
    await until(lambda: all(len(log["done"]) == first._queue.depth for first, _, log in made))
    assert not any(log["error"] for _, _, log in made)
    taken = len(device._cqs)
    for first, second, _ in made:
        first.close()
        second.close()
    again = [await pair_of(device) for _ in range(3)]
    assert len(device._cqs) == taken, "what queue pairs give back others take"
    for first, second, _ in again:
        first.close()
        second.close()
    device.close()
    region.close()


async def test_a_large_region_is_registered_while_the_loop_runs():
    device = Device("rxe0")
    region = Region.private("large", 64 << 20)
    turns, task = 0, asyncio.create_task(registered([device], region))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    assert await task == [device.register(region)]
    await device.settled()
    device.close()
    region.close()


async def test_what_the_card_cannot_do_is_said():
    with pytest.raises(Unusable, match="GID of index 77"):
        Device("rxe0", gid_index=77)


async def test_devices_that_are_not_there_are_named():
    channel = Channel("c", {})
    engine = TransferEngine(channel, ["rdma", "tcp"], {"rdma": {"devices": ["mlx5_0"]}})
    await channel.start("127.0.0.1")
    async with two_nodes() as (a, _):
        channel.introduce("a", a.channel.links.address)
        with pytest.raises(TransferError, match=r"no RDMA device 'mlx5_0', only .*rxa0.*--rdma-devices"):
            await engine.open("a")
        await engine.close()
        await channel.close()


async def test_a_killed_peer_loses_the_transfer_and_nothing_else():
    """SIGKILL in the middle of a write: it fails, and this side's memory and other rails are as before. Its kernel may
    take away the memory before the queue pair, and then the error is that of a refused access."""
    channel = Channel("a", {})
    engine = TransferEngine(channel, ["rdma"], {"rdma": {"devices": ["rxa0", "rxa1"]}})
    region = Region.private("kv-a", SIZE)
    engine.register(region)
    await channel.start("127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.rdma.peer", stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
    )
    try:
        channel.introduce("b", tuple(json.loads(await process.stdout.readline())))
        await engine.open("b")
        sent = random.Random(1).randbytes(SIZE)
        region.memory[:] = sent
        await engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)])
        task = asyncio.create_task(engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)] * 4))
        await asyncio.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises((PeerLost, TransferError)):
            await task
        with pytest.raises(PeerLost):
            await engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)])
        assert bytes(region.memory) == sent
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await engine.close()
        await channel.close()
        region.close()


async def test_a_writer_killed_midway_is_fenced_off():
    """SIGKILL of the initiator: its memory here is told lost, and after the fence no byte lands any more."""
    async with two_nodes() as (a, _):
        lost = []
        a.channel.on_lost(lost.append)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.rdma.peer", "write", *map(str, a.channel.links.address)),
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.PIPE,
        )
        try:
            await process.stdout.readline()
            await until(lambda: any(a.region.memory[:8]))
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: lost == ["w"])
            await a.engine.fence("w")
            a.region.memory[:] = bytes(SIZE)
            await asyncio.sleep(0.3)
            assert not any(a.region.memory)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_many_rounds_leave_no_request_behind():
    async with two_nodes() as (a, b):
        for seed in range(5):
            rng = random.Random(seed)
            print("seed", seed)
            fill(a.region, seed)
            order = rng.sample(range(SIZE // 4096), 200)
            spans = [(4096 * i, 4096 * j, rng.randint(1, 4096)) for i, j in enumerate(order)]
            await asyncio.gather(
                *(a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", spans[k::4]) for k in range(4)),
            )
            for here, there, length in spans:
                assert b.region.memory[there : there + length] == a.region.memory[here : here + length]
        assert all(rail.in_flight == 0 for rail in rails_of(a, "b"))
        assert all(pair.room == pair._queue.depth for pair in link_of(a, "b")._pump.pairs)

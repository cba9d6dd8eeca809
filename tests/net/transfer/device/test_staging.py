"""Device memory in transfers: every direction between host and device, with copies that are late."""

import asyncio
import random
import threading
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import PeerLost, TransferError
from net.transfer.common.memory import Region
from net.transfer.device.memory import chunks
from net.transfer.device.staging import BUFFERS, STAGING, DeviceRegion, DeviceTransferEngine
from net.transfer.engine import URGENT, Op, TransferEngine
from tests.net.fake_device import FakeDevice
from tests.net.peers import channels, until

SIZE = 64 << 10
BUFFER = 4 << 10


class Side:
    """A node with its arenas 'host' and 'device', filled with noise."""

    def __init__(self, channel, order, seed):
        self.channel = channel
        self.engine = DeviceTransferEngine(channel, order, buffer_bytes=BUFFER)
        self.device = FakeDevice(SIZE, seed)
        self.host = Region.shared("host", SIZE)
        self.memory = {"host": self.host.memory, "device": self.device.memory}
        rng = random.Random(seed)
        for memory in self.memory.values():
            memory[:] = rng.randbytes(SIZE)
        self.engine.register(self.host)
        self.engine.register(DeviceRegion("device", self.device))

    def settled(self) -> bool:
        """All buffers are back and no copy runs."""
        begun, ended = (sum(kind == which for kind, _ in self.device.log) for which in ("begin", "end"))
        return all(queue.qsize() == BUFFERS for queue in self.engine._free.values()) and begun == ended

    async def close(self):
        await self.engine.close()
        self.device.close()
        self.host.close()


@asynccontextmanager
async def two(order=("shm", "tcp")):
    async with channels("a", "b") as made:
        sides = [Side(channel, order, seed) for seed, channel in enumerate(made)]
        try:
            yield sides
        finally:
            for side in sides:
                await side.close()
                assert side.device.pinned == []


def scattered(seed, count=20):
    """Spans that do not overlap, of all sizes up to three buffers, in no order."""
    rng = random.Random(seed)
    print("seed", seed)
    sizes = [rng.choice([1, 100, 1000, BUFFER, 3 * BUFFER - 5]) for _ in range(count)]
    here, there, at = [], [], 0
    while sizes and at + sizes[-1] < SIZE:
        here.append((at, sizes[-1]))
        at += sizes.pop()
    there = list(here)
    rng.shuffle(there)
    spans, at = [], 0
    for offset, length in there:
        spans.append((offset, at, length))
        at += length
    return spans


@pytest.mark.parametrize("order", [("shm",), ("tcp",)], ids="-".join)
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("local", ["host", "device"])
@pytest.mark.parametrize("remote", ["host", "device"])
async def test_bytes_arrive_between_hosts_and_devices(order, op, local, remote):
    async with two(order) as (a, b):
        spans = scattered(len(order[0] + op.value + local + remote))
        mine, theirs = bytes(a.memory[local]), bytes(b.memory[remote])
        done = await a.engine.submit("b", op, local, remote, spans)
        assert done.nbytes == sum(length for _, _, length in spans)
        assert done.transport == order[0] + ("" if local == remote == "host" else "+staging")
        wanted = bytearray(theirs if op is Op.WRITE else mine)
        for here, there, length in spans:
            if op is Op.WRITE:
                wanted[there : there + length] = mine[here : here + length]
            else:
                wanted[here : here + length] = theirs[there : there + length]
        assert (b.memory[remote] if op is Op.WRITE else a.memory[local]) == wanted
        assert (a.memory[local] if op is Op.WRITE else b.memory[remote]) == (mine if op is Op.WRITE else theirs)
        assert a.settled() and b.settled()


async def test_a_node_to_itself_and_many_at_once():
    async with two() as (a, b):
        await a.engine.submit("a", Op.WRITE, "device", "host", [(0, 0, SIZE)])
        assert a.memory["host"] == a.memory["device"]
        length = SIZE // 16
        sent = bytes(a.memory["device"])
        await asyncio.gather(
            *(
                a.engine.submit("b", Op.WRITE, "device", "device", [(i * length, i * length, length)], priority=i % 2)
                for i in range(16)
            )
        )
        assert b.memory["device"] == sent
        assert a.settled() and b.settled()


async def test_regions_say_where_they_are():
    async with two() as (a, _):
        found = a.engine.regions()
        assert found["device"] == {"nbytes": SIZE, "place": "fake:0"}
        assert found[STAGING]["place"] == "fake:0"
        assert found["host"]["nbytes"] == SIZE and found["host"]["place"] in (None, "numa:0", "numa:1")


async def test_two_nodes_that_send_to_each_other_do_not_wait_for_each_others_buffers():
    async with two() as (a, b):
        first, second = bytes(a.memory["device"]), bytes(b.memory["device"])
        half = SIZE // 2
        async with asyncio.timeout(20):
            await asyncio.gather(
                *(a.engine.submit("b", op, "device", "device", [(0, 0, half)]) for op in (Op.WRITE,) * 3),
                *(b.engine.submit("a", op, "device", "device", [(half, half, half)]) for op in (Op.WRITE,) * 3),
            )
        assert b.memory["device"] == first[:half] + second[half:] == a.memory["device"]
        assert a.settled() and b.settled()


async def test_while_one_buffer_is_on_the_wire_the_next_is_copied_and_no_third(monkeypatch):
    plain, gate, sent = TransferEngine.submit, asyncio.Event(), []

    async def held(self, peer, op, local, *rest, **named):
        if local == STAGING:
            sent.append(rest[1][0][1])
            await gate.wait()
        return await plain(self, peer, op, local, *rest, **named)

    monkeypatch.setattr(TransferEngine, "submit", held)
    async with two() as (a, b):
        task = asyncio.create_task(a.engine.submit("b", Op.WRITE, "device", "host", [(0, 0, 5 * BUFFER)]))
        await until(lambda: len(sent) == 2)
        await asyncio.sleep(0.02)
        assert sent == [0, BUFFER]
        assert a.device.log == [("begin", "out"), ("end", "out")] * 2, "a third copy would have needed a third buffer"
        urgent = asyncio.create_task(a.engine.submit("b", Op.WRITE, "device", "host", [(0, SIZE - 9, 9)], 30, URGENT))
        await until(lambda: len(sent) == 3)
        assert sent[2] == SIZE - 9, "urgent transfers have buffers of their own"
        gate.set()
        await asyncio.gather(task, urgent)
        assert b.memory["host"][: 5 * BUFFER] == a.memory["device"][: 5 * BUFFER]


async def test_refusals_name_what_is_wrong():
    async with two() as (a, b):
        with pytest.raises(TransferError, match="outside"):
            await a.engine.submit("b", Op.WRITE, "device", "host", [(SIZE - 4, 0, 8)])
        for local in ("host", "device"):
            with pytest.raises(TransferError, match="outside"):
                await a.engine.submit("b", Op.READ, local, "device", [(0, SIZE - 4, 8)])
            with pytest.raises(TransferError, match="not registered"):
                await a.engine.submit("b", Op.READ, local, "nothing", [(0, 0, 8)])
        with pytest.raises(ValueError, match="already registered"):
            a.engine.register(DeviceRegion("host", a.device))
        b.device.broken = True
        for op in Op:
            with pytest.raises(TransferError):
                await a.engine.submit("b", op, "host", "device", [(0, 0, 8)])
        with pytest.raises(TransferError, match=r"fake:0 failed: .*fell off the bus"):
            await b.engine.submit("a", Op.WRITE, "device", "host", [(0, 0, 8)])
        assert a.settled()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", Op)
async def test_a_cancelled_or_late_transfer_moves_nothing_any_more(op, seed):
    async with two() as (a, b):
        rng = random.Random(seed)
        print("seed", seed)
        sides = [rng.choice(["host", "device"]) for _ in range(2)]
        if rng.random() < 0.5:
            task = asyncio.create_task(a.engine.submit("b", op, *sides, [(0, 0, SIZE)]))
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
        else:
            move = a.engine.submit("b", op, *sides, [(0, 0, SIZE)], timeout_s=rng.random() * 0.02)
            ended = (await asyncio.gather(move, return_exceptions=True))[0]
        assert isinstance(ended, asyncio.CancelledError | TimeoutError) or ended.nbytes == SIZE
        await until(lambda: a.settled() and b.settled())
        before = [bytes(side.memory[name]) for side in (a, b) for name in ("host", "device")]
        await asyncio.sleep(0.02)
        assert before == [bytes(side.memory[name]) for side in (a, b) for name in ("host", "device")]
        await a.engine.submit("b", Op.WRITE, "device", "device", [(0, 0, SIZE)])
        assert b.memory["device"] == a.memory["device"]


async def test_a_chunk_that_is_cancelled_before_it_begins_gives_its_buffer_back():
    async with two() as (a, b):
        task = asyncio.create_task(a.engine.submit("b", Op.WRITE, "device", "host", [(0, 0, BUFFER)]))
        for _ in range(1000):
            await asyncio.sleep(0)
            if not a.settled():  # a buffer is taken; the task for it has been made in the same step
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: a.settled() and b.settled())


async def test_a_lost_peer_is_behind_the_fence():
    async with two(("tcp",)) as (a, b):
        await a.engine.submit("b", Op.WRITE, "host", "device", [(0, 0, 1)])
        task = asyncio.create_task(a.engine.submit("b", Op.WRITE, "host", "device", [(0, 0, SIZE)]))
        await until(lambda: b.engine._others._serving or task.done())
        b.channel.drop("a", "the test says so")
        with pytest.raises((PeerLost, TransferError)):
            await task
        await b.engine.fence("a")
        assert b.settled()


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300)), max_size=20),
    st.integers(1, 200),
)
@settings(deadline=None)
def test_chunks_hold_every_byte_once_and_in_order(spans, most):
    got = [
        (here + i, there + i) for one in chunks(spans, most) for here, _, there, size in one.pieces for i in range(size)
    ]
    assert got == [(here + i, there + i) for here, there, length in spans for i in range(length)]
    for one in chunks(spans, most):
        assert 0 < one.nbytes <= most
        at = 0
        for _, offset, _, size in one.pieces:
            assert offset == at
            at += size
        assert at == one.nbytes


def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]

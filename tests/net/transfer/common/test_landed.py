"""Which spans have landed, against a model that counts bytes; and with real submissions that end half-way."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.device.staging import DeviceRegion, DeviceTransferEngine
from net.transfer.engine import Op, PeerLost, TransferEngine, TransferError, transports
from tests.net.fake_device import FakeDevice
from tests.net.fake_transport import Fabric, Fake, Faults
from tests.net.peers import channels

MIB = 1 << 20
SIZE = 24 * MIB


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=30),
)
def test_a_span_has_landed_when_every_byte_has(cells, parts):
    spans = [(10 * cell, 10 * ((7 * cell) % 61), 10 - cell % 3) for cell in cells]
    landed, seen = LandedSpans(), set()
    for which, begin, length in parts:
        local, remote, whole = spans[which % len(spans)]
        length = min(length, whole - begin)
        if length > 0:
            landed.add([(local + begin, remote + begin, length)])
            seen.update((local + i, remote + i) for i in range(begin, begin + length))
    wanted = [all((local + i, remote + i) in seen for i in range(length)) for local, remote, length in spans]
    assert landed.of(spans) == wanted


def test_bytes_that_went_elsewhere_do_not_count():
    landed = LandedSpans()
    landed.add([(0, 100, 50)])
    assert landed.of([(0, 100, 50), (0, 200, 50), (10, 110, 40), (0, 0, 0)]) == [True, False, True, True]


@pytest.mark.parametrize("seed", range(3))
async def test_after_a_cut_what_is_said_to_have_landed_has(monkeypatch, seed):
    monkeypatch.setitem(transports, "fake", Fake)
    fabric = Fabric(seed, Faults(delay_s=0.002, drop=0.1, cut_after=50))
    async with channels("a", "b") as made:
        a, b = (TransferEngine(channel, ["fake"], {"fake": {"fabric": fabric}}) for channel in made)
        with Region.private("x", 4 * MIB) as x, Region.private("y", 4 * MIB) as y:
            a.register(x)
            b.register(y)
            x.memory[:] = random.Random(seed).randbytes(4 * MIB)
            landed = LandedSpans()
            spans = [(i << 16, (63 - i) << 16, 1 << 16) for i in range(64)]
            with pytest.raises(PeerLost):
                await a.submit("b", Op.WRITE, "x", "y", spans, landed=landed)
            status = landed.of(spans)
            assert any(status) and not all(status)
            assert all(
                x.memory[here : here + n] == y.memory[there : there + n]
                for (here, there, n), whole in zip(spans, status, strict=True)
                if whole
            )
            await a.close()
            await b.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("op", list(Op))
async def test_cancelled_submissions_can_be_finished_with_the_rest(transport, op):
    rng = random.Random(5)
    async with channels("a", "b") as made:
        a, b = (TransferEngine(channel, [transport]) for channel in made)
        with Region.shared("x", SIZE) as x, Region.shared("y", SIZE) as y:
            a.register(x)
            b.register(y)
            await a.submit("b", op, "x", "y", [(0, 0, 1)])
            x.memory[:], y.memory[:] = rng.randbytes(SIZE), rng.randbytes(SIZE)
            left = [(at, SIZE - MIB - at, MIB) for at in range(0, SIZE, MIB)]
            for _ in range(40):
                landed = LandedSpans()
                task = asyncio.create_task(a.submit("b", op, "x", "y", left, landed=landed))
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                left = [span for span, whole in zip(left, landed.of(left), strict=True) if not whole]
            await a.submit("b", op, "x", "y", left)
            for at in range(0, SIZE, MIB):
                assert x.memory[at : at + MIB] == y.memory[SIZE - MIB - at : SIZE - at]
            await a.close()
            await b.close()


async def test_a_device_tells_as_well():
    async with channels("a", "b") as made:
        a, b = (DeviceTransferEngine(channel, ["shm"], buffer_bytes=4096) for channel in made)
        device = FakeDevice(1 << 16, 1)
        with Region.shared("y", 1 << 16) as y:
            a.register(DeviceRegion("x", device))
            b.register(y)
            landed, spans = LandedSpans(), [(0, 100, 9000), (20000, 0, 7)]
            await a.submit("b", Op.WRITE, "x", "y", spans, landed=landed)
            assert landed.of(spans) == [True, True]
            device.broken = True
            landed = LandedSpans()
            with pytest.raises(TransferError):
                await a.submit("b", Op.WRITE, "x", "y", spans, landed=landed)
            assert landed.of(spans) == [False, False]
            await a.close()
            await b.close()
        device.close()

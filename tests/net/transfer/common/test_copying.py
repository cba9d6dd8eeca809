"""Copies are complete, split evenly, and stop when told to."""

import asyncio

import pytest

from net.transfer.common.copying import PIECE_BYTES, Copier, Copy
from net.transfer.common.memory import Region
from net.transfer.common.transport import Op

SIZE = 24 << 20


@pytest.fixture
def regions():
    with Region.private("a", SIZE) as a, Region.private("b", SIZE) as b:
        b.memory[:] = bytes(range(256)) * (SIZE // 256)
        yield a, b


async def test_several_threads_copy_one_batch(regions):
    a, b = regions
    copier = Copier()
    copier._workers = 3
    spans = [(0, 0, 9 << 20), (9 << 20, 9 << 20, 1), ((9 << 20) + 1, (9 << 20) + 1, SIZE - (9 << 20) - 1)]
    await copier.copy(Copy(Op.READ, a, b, spans), SIZE)
    assert a.memory == b.memory
    copier.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_hold_every_byte_once(regions, count):
    a, b = regions
    copy = Copy(Op.WRITE, a, b, [(0, 100, 7 << 20), (8 << 20, 9 << 20, 12345)])
    parts = copy.parts(count)
    assert len(parts) <= count
    assert sum(length for part in parts for _, _, length in part) == (7 << 20) + 12345
    assert max(length for part in parts for _, _, length in part) <= PIECE_BYTES
    for part in parts:
        copy.run(part)
    assert b.memory[100 : 100 + (7 << 20)] == bytes(7 << 20)


async def test_a_cancelled_copy_has_stopped(regions):
    a, b = regions
    copier = Copier()
    copy = Copy(Op.READ, a, b, [(0, 0, SIZE)])
    task = asyncio.create_task(copier.copy(copy, SIZE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert copy.stopped
    state = bytes(a.memory)
    copier.close()
    assert bytes(a.memory) == state


def test_a_closed_region_stays_mapped_until_its_copy_is_done():
    a, b = Region.private("a", 1 << 20), Region.private("b", 1 << 20)
    copy = Copy(Op.WRITE, a, b, [(0, 0, 1 << 20)])
    a.close()
    b.close()
    copy.run()

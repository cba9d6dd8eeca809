"""Copies of every size, on the loop and in threads: the bytes arrive and the checksum is theirs."""

import asyncio
import random

import pytest

from cache.arena import checksum
from cache.block_copy import BlockCopy
from cache.checked_copy import CheckedCopier, Copy
from cache.copy_threads import CopyThreads
from net.transfer.common.memory import Region

SIZES = {
    "small": [4096] * 5 + [1, 100, 240, 241],
    "one block": [368 << 10],
    "in turns": [512 << 10, 700_000, 100],
    "in threads": [1 << 20] * 5 + [333],
    "one large block": [9 << 20],
}


@pytest.fixture(params=["compiled", "python"])
def copier(request):
    threads = CopyThreads()
    copier = CheckedCopier(threads, BlockCopy() if request.param == "compiled" else None)
    yield copier
    copier.close()
    threads.close()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
async def test_bytes_and_checksums(copier, sizes):
    total = sum(sizes)
    with Region.private("from", total) as source, Region.private("to", total) as target:
        source.memory[:] = random.Random(total).randbytes(total)
        copies, at = [], 0
        for size in sizes:
            copies.append(Copy(source.address + at, target.address + at, target.memory[at : at + size]))
            at += size
        sums = await copier.copy(copies)
        assert target.memory == source.memory
        assert sums == [checksum(bytes(one.memory)) for one in copies]
        del copies


@pytest.mark.parametrize("count", [1, 4])
async def test_nothing_is_written_after_a_cancelled_copy(copier, count):
    size = 16 << 20
    with Region.private("from", size) as source, Region.private("to", size) as target:
        source.memory[:] = b"\1" * size
        step = size // count
        copies = [
            Copy(source.address + at, target.address + at, target.memory[at : at + step]) for at in range(0, size, step)
        ]
        task = asyncio.create_task(copier.copy(copies))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target.memory[:] = bytes(size)
        await asyncio.sleep(0.02)
        assert target.memory == bytes(size)
        del copies

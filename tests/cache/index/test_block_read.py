"""Blocks found, copied and compared in one C call: the bytes of the block or nothing, whatever the index says."""

import asyncio
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import checksum
from cache.copy_threads import CopyThreads
from cache.index.block_read import ON_LOOP_BYTES, BlockRead
from cache.index.shared_index import BUCKET, HEADER_BYTES, ROW, IndexView, SharedIndex, index_bytes
from net.compiled import NotCompiled
from net.transfer.common.memory import Region

SHORT = 240


@pytest.fixture(scope="module")
def code():
    return BlockRead()


class Home:
    """An arena and its index, and memory of a reader's. `shift`: bytes by which the reader's blocks are off a line."""

    def __init__(self, slots: int, slot_bytes: int, shift: int = 0) -> None:
        self.slot_bytes, self.shift = slot_bytes, shift
        self.arena = Region.private("dram", slots * slot_bytes)
        self.region = Region.private("index", index_bytes(slots))
        self.target = Region.private("kv", slots * slot_bytes + shift)
        self.index = SharedIndex(self.region, "dram", slot_bytes)
        self.view = IndexView(self.region)
        self.threads = CopyThreads()

    def put(self, slot: int, length: int) -> bytes:
        """A new block; its key."""
        key = random.Random(slot).randbytes(16)
        content = random.Random(1000 + slot).randbytes(length)
        self.arena.memory[slot * self.slot_bytes : slot * self.slot_bytes + length] = content
        self.index.put(key, slot, length, checksum(content))
        return key

    async def get(self, code: BlockRead, keys: list[bytes]) -> list[bytes | None]:
        starts = [self.shift + at * self.slot_bytes for at in range(len(keys))]
        targets = [self.target.address + start for start in starts]
        lengths = await code.get(self.threads, self.view, self.arena, keys, targets)
        found = zip(starts, lengths, strict=True)
        return [bytes(self.target.memory[start : start + length]) if length else None for start, length in found]

    def close(self) -> None:
        self.threads.close()
        del self.view
        for region in (self.arena, self.region, self.target):
            region.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=8), st.sampled_from([0, 1, 8, 32]))
def test_blocks_of_every_length_and_place(code, lengths, shift):
    """The checksums are those of the xxhash package. Short values are left to Python."""
    home = Home(len(lengths), 9000, shift)
    keys = [home.put(slot, length) for slot, length in enumerate(lengths)]
    found = asyncio.run(home.get(code, keys))
    for slot, (block, length) in enumerate(zip(found, lengths, strict=True)):
        assert block == (None if length <= SHORT else random.Random(1000 + slot).randbytes(length))
    home.close()


@pytest.mark.parametrize("slot_bytes", [64 << 10, 200_001, ON_LOOP_BYTES // 2, ON_LOOP_BYTES + 4096])
async def test_large_blocks_on_the_loop_and_in_threads(code, slot_bytes):
    home = Home(4, slot_bytes)
    keys = [home.put(slot, slot_bytes - slot) for slot in range(4)]
    for some in (keys[:1], keys):
        assert await home.get(code, some) == [
            random.Random(1000 + slot).randbytes(slot_bytes - slot) for slot in range(len(some))
        ]
    home.close()


async def test_what_is_not_the_block_is_nothing(code):
    home = Home(4, 4096)
    keys = [home.put(slot, 4096) for slot in range(4)]
    home.arena.memory[4096 + 7] ^= 1  # damaged, or on its way to be another block
    home.index.drop(keys[2])
    unknown = bytes(16)  # equal to the key of an empty row
    found = await home.get(code, [keys[0], keys[1], keys[2], unknown])
    assert found == [random.Random(1000).randbytes(4096), None, None, None]
    home.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_row_that_is_half_written_reads_nothing_outside(code, slot, length, mixed):
    """Any slot and any length in the row: no byte outside the arena is looked at, none outside the slot written."""
    home = Home(2, 4096)
    key = home.put(0, 4096)
    raw = home.region.memory
    at = next(at for at in range(HEADER_BYTES, len(raw) - BUCKET + 1, ROW.size) if raw[at : at + 16] == key)
    raw[at + 16 : at + ROW.size] = struct.pack("<QII", mixed, slot, length)
    assert asyncio.run(home.get(code, [key])) == [None]
    assert home.target.memory[4096:] == bytes(4096)
    del raw
    home.close()


async def test_nothing_is_written_after_a_cancelled_read(code):
    slot_bytes, count = 2 << 20, 4
    home = Home(count, slot_bytes)
    keys = [home.put(slot, slot_bytes) for slot in range(count)]
    task = asyncio.create_task(home.get(code, keys))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    home.target.memory[:] = bytes(count * slot_bytes)
    await asyncio.sleep(0.01)
    assert home.target.memory == bytes(count * slot_bytes)
    home.close()


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotCompiled, match="apt install gcc"):
        BlockRead()

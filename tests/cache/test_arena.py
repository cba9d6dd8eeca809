"""Slots of a region."""

import pytest

from cache.arena import Arena, checksum
from net.transfer.common.memory import Region


def test_slots_cover_the_region_without_overlap():
    with Region.shared("dram", 1000) as region:
        arena = Arena(region, 300)
        assert (arena.name, arena.num_slots) == ("dram", 3)
        for slot in range(3):
            assert arena.slot_span(slot) == (slot * 300, 300)
            arena.memory(slot)[:] = bytes([slot + 1]) * 300
        assert bytes(region.memory) == b"\1" * 300 + b"\2" * 300 + b"\3" * 300 + b"\0" * 100


@pytest.mark.parametrize("slot", [-1, 3])
def test_slots_outside_are_refused(slot):
    with Region.private("dram", 1000) as region, pytest.raises(IndexError, match="of 3"):
        Arena(region, 300).memory(slot)


@pytest.mark.parametrize("slot_bytes", [0, -1, 1001])
def test_an_arena_holds_at_least_one_slot(slot_bytes):
    with Region.private("dram", 1000) as region, pytest.raises(ValueError, match="holds no slot"):
        Arena(region, slot_bytes)


def test_the_checksum_sees_every_byte():
    block = bytearray(5000)
    before = checksum(block)
    for at in (0, 2500, 4999):
        block[at] ^= 1
        assert checksum(memoryview(block)) != before
        block[at] ^= 1
    assert checksum(block) == before

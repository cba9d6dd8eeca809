"""Held blocks of an SSD tier: not evicted, readable in parts, and forgotten by a restart."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache.arena import checksum
from cache.pool.policy import PLAIN
from cache.ssd import SsdError, SsdTier, backends
from cache.tiers.lodging import SsdLodging

SLOT = 5000


def block_of(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def put(tier: SsdTier, i: int) -> bool:
    return tier.put(key_of(i), block_of(i), checksum(block_of(i)))


@pytest.fixture(params=sorted(backends))
def tier(request, tmp_path):
    made = SsdTier(tmp_path, SLOT, 1 << 20, b"r" * 16, backend=request.param)
    yield made
    made.close()


def test_held_blocks_outlive_any_number_of_others(tier):
    assert tier.hold(key_of(0)) is None
    put(tier, 0)
    entry = tier.hold(key_of(0))
    assert entry is not None and tier.hold(key_of(0)) == entry and tier.stats()["held"] == 1
    for i in range(1, 2 * tier.capacity):
        assert put(tier, i)
    assert tier.contains(key_of(0)) and not tier.contains(key_of(1))
    for begin, count in ((0, 10), (4990, 10), (1234, 3000), (0, SLOT)):
        into = bytearray(count)
        tier.read_part(entry, begin, memoryview(into))
        assert into == block_of(0)[begin : begin + count]
    tier.unhold([key_of(0)])
    assert tier.stats()["held"] == 1, "once for each hold"
    tier.unhold([key_of(0)])
    for i in range(10_000, 10_000 + 2 * tier.capacity):
        put(tier, i)
    assert not tier.contains(key_of(0)) and tier.stats()["held"] == 0


def test_holds_and_kept_blocks_do_not_undo_each_other(tier):
    for i in (0, 1):
        put(tier, i)
    tier.hold(key_of(0))
    tier.keep(key_of(0), True)
    tier.keep(key_of(0), False)
    tier.keep(key_of(1), True)
    tier.hold(key_of(1))
    tier.unhold([key_of(1)])
    for i in range(2, 2 + 2 * tier.capacity):
        put(tier, i)
    assert tier.contains(key_of(0)) and tier.contains(key_of(1))


def test_a_lodging_writes_finds_and_gives_up(tier):
    with ThreadPoolExecutor(1) as thread:
        lodging = SsdLodging(tier, thread)
        entries = [lodging.put(key_of(i), block_of(i), checksum(block_of(i)), PLAIN).result() for i in range(3)]
        again = lodging.put(key_of(1), bytes(SLOT), checksum(bytes(SLOT)), PLAIN).result()
        assert again.checksum == entries[1].checksum, "the tier has that key already, and says what it is"
        other, into = SsdLodging(tier, thread), bytearray(SLOT)
        assert other.take(key_of(2), into) is not None and into == block_of(2)
        assert other.take(key_of(9), into) is None
        part = bytearray(100)
        other.read(entries[2], 700, memoryview(part))
        assert part == block_of(2)[700:800]
        assert tier.stats()["held"] == 3
        lodging.close()
        lodging.close()
        assert tier.stats()["held"] == 1
        other.close()
        assert tier.stats()["held"] == 0


def test_a_write_waits_for_its_turn_and_holds_nothing_if_its_owner_has_gone(tier):
    with ThreadPoolExecutor(1) as thread:
        turn = threading.Event()
        thread.submit(turn.wait)
        lodging, gone = SsdLodging(tier, thread), SsdLodging(tier, thread)
        written = lodging.put(key_of(0), block_of(0), checksum(block_of(0)), PLAIN)
        late = gone.put(key_of(1), block_of(1), checksum(block_of(1)), PLAIN)
        assert not written.done()
        gone.close()
        turn.set()
        assert written.result().checksum == checksum(block_of(0))
        with pytest.raises(SsdError):
            late.result()
        assert tier.contains(key_of(1)) and tier.stats()["held"] == 1
        lodging.close()
        assert tier.stats()["held"] == 0


def test_a_removed_block_that_is_held_leaves_and_may_come_back(tier):
    put(tier, 0)
    tier.hold(key_of(0))
    assert tier.delete(key_of(0)) and not tier.contains(key_of(0))
    put(tier, 0)
    for i in range(1, 2 * tier.capacity):
        put(tier, i)
    assert tier.contains(key_of(0))
    tier.unhold([key_of(0)])
    assert tier.stats()["held"] == 0

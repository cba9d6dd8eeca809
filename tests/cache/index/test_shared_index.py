"""The index that other processes read: it names what is there, and no half of a row is taken for another block."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cache.index.shared_index import BUCKET, HEADER_BYTES, ROW, ROWS, IndexView, Row, SharedIndex, index_bytes
from net.transfer.common.memory import Region

SLOTS = 64


@pytest.fixture
def region():
    with Region.private("index", index_bytes(SLOTS)) as region:
        yield region


def test_what_was_put_is_found_until_it_is_dropped(region):
    index, key = SharedIndex(region, "dram", 4096), bytes(16)
    view = IndexView(region)
    assert (view.arena, view.slot_bytes, view.find(key)) == ("dram", 4096, None)
    index.put(key, 7, 4000, 1 << 63)
    assert view.find(key) == Row(7, 4000, 1 << 63)
    index.drop(key)
    assert view.find(key) is None
    index.drop(key)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, SLOTS))
def test_it_follows_a_dictionary(seed, slots):
    """Except that a full bucket passes a block over until it is put again."""
    rng = random.Random(seed)
    with Region.private("index", index_bytes(SLOTS)) as region:
        index, known = SharedIndex(region, "dram", 100), {}
        view = IndexView(region)
        rows: dict[int, set[bytes]] = {bucket: set() for bucket in range(view.buckets)}
        for _ in range(300):
            if known and (len(known) == slots or rng.random() < 0.3):
                key = rng.choice(list(known))
                del known[key]
                index.drop(key)
                rows[bucket_of(key, view)].discard(key)
            else:
                key = rng.randbytes(16)
                known[key] = Row(rng.randrange(SLOTS), rng.randint(1, 100), rng.randrange(1 << 64))
                index.put(key, *known[key])
                if len(rows[bucket_of(key, view)]) < ROWS:
                    rows[bucket_of(key, view)].add(key)
            listed = set().union(*rows.values())
            assert all(view.find(key) == (row if key in listed else None) for key, row in known.items())
            assert view.find(rng.randbytes(16)) is None


def bucket_of(key: bytes, view: IndexView) -> int:
    return xxh3_64_intdigest(key) % view.buckets


def test_halves_of_two_rows_do_not_make_one(region):
    """The key of one block and the rest of another's row, as a reader may see them: the checksum it derives is neither
    block's, so the bytes will not match it."""
    index = SharedIndex(region, "dram", 4096)
    one, other = b"a" * 16, b"b" * 16
    index.put(one, 1, 4096, 111)
    view = IndexView(region)
    at = next(at for at in range(HEADER_BYTES, region.nbytes, ROW.size) if region.memory[at : at + 16] == one)
    torn = bytearray(region.nbytes)
    torn[:HEADER_BYTES] = region.memory[:HEADER_BYTES]
    for bucket in range(HEADER_BYTES, len(torn) - BUCKET + 1, BUCKET):
        torn[bucket : bucket + ROW.size] = other + bytes(region.memory[at + 16 : at + ROW.size])
    region.memory[:] = torn
    found = view.find(other)
    assert found is not None
    assert found.slot == 1
    assert found.checksum != 111


def test_another_version_is_refused(region):
    SharedIndex(region, "dram", 4096)
    region.memory[8] = 9
    with pytest.raises(ValueError, match="not an index of version"):
        IndexView(region)

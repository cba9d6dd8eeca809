"""The index of block keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.pool.block_pool import BlockPool
from cache.pool.prefix import PrefixIndex

KEYS = st.binary(min_size=16, max_size=16)


@given(st.lists(KEYS, unique=True, max_size=20), st.sets(st.integers(0, 19)))
def test_the_match_is_the_longest_leading_run(keys, missing):
    index = PrefixIndex()
    for block_id, key in enumerate(keys):
        if block_id not in missing:
            index.add(key, block_id)
    run = min([*missing, len(keys)])
    assert index.match(keys) == list(range(min(run, len(keys))))
    assert index.consistent()


def test_a_pair_is_added_and_removed_whole():
    index = PrefixIndex()
    index.add(b"k", 3)
    assert (index.block_of(b"k"), index.key_of(3), len(index)) == (3, b"k", 1)
    assert index.remove(3) == b"k"
    assert (index.block_of(b"k"), index.key_of(3), len(index)) == (None, None, 0)
    with pytest.raises(KeyError):
        index.remove(3)


def test_neither_key_nor_block_has_two_partners():
    index = PrefixIndex()
    index.add(b"k", 3)
    with pytest.raises(ValueError, match="already"):
        index.add(b"k", 4)
    with pytest.raises(ValueError, match="already"):
        index.add(b"l", 3)
    assert list(index.pairs()) == [(b"k", 3)]


def test_a_pool_tells_what_it_holds_and_what_comes_and_goes():
    pool, held = BlockPool(4), set()
    pool.name(pool.allocate(1)[0], b"before")

    def told(key: bytes, is_held: bool) -> None:
        (held.add if is_held else held.remove)(key)

    pool.watch(told)
    assert held == {b"before"}
    [block_id] = pool.allocate(1)
    pool.name(block_id, b"after")
    assert held == {b"before", b"after"} == set(pool.keys())
    pool.release([block_id])
    pool.allocate(3)  # evicts it
    assert held == {b"before"} == set(pool.keys())

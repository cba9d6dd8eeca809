"""The index of block keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.pool.block_pool import BlockPool
from cache.pool.prefix import Place, PrefixIndex

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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60), st.integers(0, 60))
def test_a_place_is_told_while_all_of_its_groups_are_here(flips, begun):
    """Blocks of three groups at four places come and go; a watcher that begins late hears the same."""
    index, here, told, own = PrefixIndex(), set(), set(), set()

    def hear(key: bytes, held: bool) -> None:
        (told.add if held else told.remove)(key)

    for number, (group, place) in enumerate(flips):
        if number == begun:
            index.watch(hear, places=True)
            index.watch(lambda key, held: own.add(key))
        block, name = 4 * group + place, b"place %d" % place
        if (group, place) in here:
            index.remove(block)
            here.remove((group, place))
        else:
            index.add(b"%d of %d" % (place, group), block, Place(name, 3))
            here.add((group, place))
        if number >= begun:
            assert told == {b"place %d" % i for i in range(4) if {(g, i) for g in range(3)} <= here}
    assert not own, "blocks of other groups are not told one by one"

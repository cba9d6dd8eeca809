"""Who owes whom a copy, hints, and heat."""

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.homes.heat import KEYS_MAX, RESIDENCY_S, Heat, HotBlocks
from cache.homes.rendezvous import equal_members, homes
from cache.homes.repair import HINTS_MAX, Hints, owed

KEYS = [blake2b(str(i).encode(), digest_size=16).digest() for i in range(300)]
MEMBERS = st.sets(st.sampled_from("abcdef"), min_size=1)


@given(MEMBERS, MEMBERS, st.integers(1, 3))
@settings(deadline=None)  # the machine is shared
def test_after_any_change_every_home_is_offered_what_a_survivor_had(before, after, replicas):
    """And by exactly one of the survivors."""
    was, now = equal_members(before), equal_members(after)
    for key in KEYS[:40]:
        holders = set(homes(key, was, replicas)) & after
        homes_was, homes_now = homes(key, was, replicas), homes(key, now, replicas)
        offers = [(me, home) for me in holders for home in owed(key, me, was, now, replicas)]
        first = next((name for name in homes_was if name in after), None)
        for me in holders.difference(homes_now, {first}):  # the homes may have another value by now
            assert owed(key, me, was, now, replicas) == homes_now[:1]
            offers.remove((me, homes_now[0]))
        assert len({home for _, home in offers}) == len(offers), "one offer per home"
        if holders:
            assert {home for _, home in offers} == set(homes(key, now, replicas)) - set(homes(key, was, replicas))


def test_a_join_moves_only_the_newcomers_share():
    was, now = equal_members("abcd"), equal_members("abcde")
    offers = [(key, home) for key in KEYS for me in homes(key, was) for home in owed(key, me, was, now, 1)]
    moved = [key for key, home in offers if homes(key, was) != homes(key, now)]
    assert all(home == "e" for _, home in offers)
    assert sorted(moved) == sorted(key for key in KEYS if homes(key, now) == ["e"])
    assert len(moved) < 1.5 * len(KEYS) / 5


def test_a_restarted_node_offers_all_it_found_to_its_homes():
    members = equal_members("abc")
    for key in KEYS[:50]:
        assert owed(key, "a", {}, members, 2) == [name for name in homes(key, members, 2) if name != "a"]


def test_hints_are_given_oldest_first_and_settled():
    hints = Hints()
    for key in KEYS[:10]:
        hints.add(key, "b")
    hints.add(KEYS[10], "c")
    assert hints.owners() == {"b", "c"}
    assert hints.due("b", 3) == KEYS[:3]
    hints.settled(KEYS[:9])
    assert hints.due("b", 3) == KEYS[9:10]
    hints.forget("b")
    assert (hints.owners(), len(hints)) == ({"c"}, 1)


def test_hints_are_bounded():
    hints = Hints()
    for i in range(HINTS_MAX + 5):
        hints.add(i.to_bytes(16, "big"), "b")
    assert len(hints) == HINTS_MAX
    assert hints.due("b", 1) == [(5).to_bytes(16, "big")]


def test_heat_rises_with_reads_and_falls_with_time():
    heat = Heat(threshold=8, half_life_s=10)
    deserved = [heat.read(1.0, b"k") for _ in range(40)]
    assert deserved[:7] == [0] * 7
    assert (deserved[7], deserved[15], deserved[31]) == (1, 2, 3)
    assert heat.read(100.0, b"k") == 0
    assert len(heat) == 1, "the old count was below one and forgotten"


def test_heat_is_bounded_and_keeps_the_hottest():
    heat = Heat(threshold=4, half_life_s=1e9)
    for _ in range(3):
        heat.read(0.0, b"hot")
    for i in range(2 * KEYS_MAX):
        heat.read(0.0, i.to_bytes(16, "big"))
    assert len(heat) <= KEYS_MAX + 1
    assert heat.read(0.0, b"hot") == 1


def test_a_hot_block_keeps_its_replicas_for_a_while_and_loses_them_when_nobody_reads():
    hot, here = HotBlocks(Heat(threshold=8, half_life_s=10)), lambda key: "DRAM"
    for _ in range(16):
        hot.read(1.0, b"k")
    assert hot.take_wanted() == {b"k": 2} and hot.take_wanted() == {}
    assert hot.spread(1.0, b"k", 3) and not hot.spread(2.0, b"k", 3), "they are on their way"
    assert hot.spread(2.0, b"k", 4), "and more, as more read it"
    hot.cool(2.5, 1, here)
    assert hot.replicas == {b"k": 4}, "it was spread a moment ago"
    hot.cool(13.0, 1, here)
    assert hot.replicas == {b"k": 2}, "8 of the 16 reads are left after one half-life"
    hot.cool(60.0, 1, here)
    assert len(hot) == 0 and hot.spread(60.0, b"k", 2), "the next time it is hot copies are made again"
    hot.cool(60.5, 1, lambda key: None)
    assert len(hot) == 0, "it was evicted here"


def test_a_home_counts_for_its_replicas_and_renews_those_that_may_be_gone():
    hot = HotBlocks(Heat(threshold=8, half_life_s=1e9))
    for _ in range(8):
        hot.read(1.0, b"k")
    assert hot.spread(1.0, b"k", 2)
    for _ in range(4):
        hot.read(2.0, b"k")  # the other replica serves as many
    assert hot.take_wanted() == {b"k": 2}, "16 reads"
    assert hot.spread(1.0 + RESIDENCY_S, b"k", 2), "others may have evicted their copies"

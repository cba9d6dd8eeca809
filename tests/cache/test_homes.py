"""Rendezvous hashing."""

from collections import Counter
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from cache.homes import by_home, homes

KEYS = [blake2b(str(i).encode(), digest_size=16).digest() for i in range(3000)]
MEMBERS = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=8)


@given(MEMBERS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_homes_do_not_depend_on_the_order_of_members(members, rng, replicas):
    shuffled = members[:]
    rng.shuffle(shuffled)
    for key in KEYS[:20]:
        found = homes(key, members, replicas)
        assert found == homes(key, shuffled, replicas)
        assert len(found) == len(set(found)) == min(replicas, len(members))
        assert homes(key, members, 1) == found[:1]


@given(MEMBERS, st.integers(0, 7))
def test_only_keys_of_the_lost_member_move(members, index):
    lost = members[index % len(members)]
    rest = [member for member in members if member != lost]
    for key in KEYS[:50]:
        before, after = homes(key, members), homes(key, rest)
        assert before == [lost] or before == after


def test_keys_spread_evenly():
    members = [f"store-{i}" for i in range(5)]
    counts = Counter(homes(key, members)[0] for key in KEYS)
    assert len(counts) == 5
    assert min(counts.values()) > 0.8 * len(KEYS) / 5


def test_homes_are_the_same_in_every_process():
    assert [homes(key, ["a", "b", "c"])[0] for key in KEYS[:8]] == list("abcabbac")


def test_grouping_keeps_order_and_every_position():
    groups = by_home(KEYS[:100], ["a", "b", "c"])
    assert sorted(position for group in groups.values() for position in group) == list(range(100))
    for home, group in groups.items():
        assert group == sorted(group)
        assert all(homes(KEYS[position], ["a", "b", "c"]) == [home] for position in group)


def test_without_members_nothing_has_a_home():
    assert homes(KEYS[0], []) == homes(KEYS[0], [], 2) == []
    assert by_home(KEYS[:3], []) == {}

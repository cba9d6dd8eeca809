"""Rendezvous hashing."""

from collections import Counter
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from cache.homes.rendezvous import by_home, equal_members, homes

KEYS = [blake2b(str(i).encode(), digest_size=16).digest() for i in range(3000)]
MEMBERS = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=8)


@given(MEMBERS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_homes_do_not_depend_on_the_order_of_members(names, rng, replicas):
    shuffled = names[:]
    rng.shuffle(shuffled)
    members, shuffled = ({name: 1 + len(name) for name in order} for order in (names, shuffled))
    for key in KEYS[:20]:
        found = homes(key, members, replicas)
        assert found == homes(key, shuffled, replicas)
        assert len(found) == len(set(found)) == min(replicas, len(members))
        assert homes(key, members, 1) == found[:1]


@given(MEMBERS, st.integers(0, 7))
def test_only_keys_of_the_lost_member_move(members, index):
    lost = members[index % len(members)]
    members = equal_members(members)
    rest = {member: 1 for member in members if member != lost}
    for key in KEYS[:50]:
        before, after = homes(key, members), homes(key, rest)
        assert before == [lost] or before == after


def test_keys_spread_evenly():
    members = equal_members(f"store-{i}" for i in range(5))
    counts = Counter(homes(key, members)[0] for key in KEYS)
    assert len(counts) == 5
    assert min(counts.values()) > 0.8 * len(KEYS) / 5


def test_homes_are_the_same_in_every_process():
    assert [homes(key, equal_members("abc"))[0] for key in KEYS[:8]] == list("abcabbac")


def test_grouping_keeps_order_and_every_position():
    groups = by_home(KEYS[:100], equal_members("abc"))
    assert sorted(position for group in groups.values() for position in group) == list(range(100))
    for home, group in groups.items():
        assert group == sorted(group)
        assert all(homes(KEYS[position], equal_members("abc")) == [home] for position in group)


def test_without_members_nothing_has_a_home():
    assert homes(KEYS[0], {}) == homes(KEYS[0], {}, 2) == []
    assert by_home(KEYS[:3], {}) == {}


def test_a_member_wins_in_proportion_to_its_weight():
    members = {"small": 1, "medium": 2, "large": 5}
    counts = Counter(homes(key, members)[0] for key in KEYS)
    for name, weight in members.items():
        assert abs(counts[name] / len(KEYS) - weight / 8) < 0.03


def test_a_newcomer_takes_its_share_and_nothing_else_moves():
    before = {"a": 3, "b": 2, "c": 2}
    after = before | {"d": 1}
    moved = [key for key in KEYS if homes(key, before) != homes(key, after)]
    assert all(homes(key, after) == ["d"] for key in moved)
    assert abs(len(moved) / len(KEYS) - 1 / 8) < 0.03
    for key in KEYS[:200]:
        assert [name for name in homes(key, after, 4) if name != "d"] == homes(key, before, 3)

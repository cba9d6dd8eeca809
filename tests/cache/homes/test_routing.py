"""Which home is asked next, and which one is written to: the walks of one call."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from cache.homes.deciding import DecidingWalk
from cache.homes.pace import SLOW_S
from cache.homes.rendezvous import equal_members, homes
from cache.homes.routing import GRACE_S, HOT_S, SPARES, Router, Target
from cache.protocol import STORED

KEYS = [blake2b(str(i).encode(), digest_size=16).digest() for i in range(200)]
NAMES = ["a", "b", "c", "d", "e"]
COUNTS = st.integers(1, 5)


def router_of(names, replicas=1, me="me"):
    router = Router(me, replicas)
    router.update(0.0, equal_members(names))
    return router


def test_one_replica_is_one_wave():
    router = router_of(NAMES)
    walk = router.read(0.0, KEYS, 100)
    assert walk.single
    groups = walk.wave(leading=True)
    assert sorted(p for group in groups.values() for p in group) == list(range(len(KEYS)))
    assert all(homes(KEYS[p], router.members) == [home] for home, group in groups.items() for p in group)
    for position in range(10):
        walk.found(position)
    assert walk.wave(leading=True) == {}, "a miss at the only candidate is a miss"


@given(COUNTS, st.integers(1, 4), st.data())
def test_a_read_asks_every_replica_once_and_finds_what_one_of_them_has(members, replicas, data):
    router = router_of(NAMES[:members], replicas)
    holders = [data.draw(st.sets(st.sampled_from(NAMES[:members]))) for _ in range(8)]
    walk = router.read(0.0, KEYS[:8], 100)
    asked = [[] for _ in range(8)]
    while groups := walk.wave():
        for home, positions in groups.items():
            assert positions == sorted(positions)
            for position in positions:
                asked[position].append(home)
                if home in holders[position]:
                    walk.found(position)
    for position, names in enumerate(asked):
        candidates = homes(KEYS[position], router.members, replicas)
        assert len(names) == len(set(names))
        assert set(names) <= set(candidates)
        have = holders[position] & set(candidates)
        assert (names[-1] in have) if have else (set(names) == set(candidates))


@given(COUNTS, st.integers(1, 3), st.integers(0, 4))
def test_what_was_written_around_homes_that_fail_is_read_around_them(members, replicas, dead):
    """The reader turns to the same members as the writer did, whichever `dead` ones do not answer."""
    router = router_of(NAMES[:members], replicas)
    gone = set(NAMES[:dead])
    placed = {position: set() for position in range(20)}
    walk = router.write(KEYS[:20])
    while groups := walk.wave():
        for target, positions in groups.items():
            for position in positions:
                if target.home in gone:
                    walk.failed(position, target, full=False)
                else:
                    assert target.home not in placed[position]
                    placed[position].add(target.home)
                    owners = homes(KEYS[position], router.members, replicas)
                    assert (target.owner in owners) if target.owner else (target.home in owners)
    reach = {p: set(homes(KEYS[p], router.members, replicas + SPARES)) - gone for p in placed}
    read = router.read(0.0, KEYS[:20], 1)
    found = set()
    while groups := read.wave():
        for home, positions in groups.items():
            for position in positions:
                if home in gone:
                    read.elsewhere(position)
                elif home in placed[position]:
                    read.found(position)
                    found.add(position)
    assert found == {position for position, names in reach.items() if names}


@given(COUNTS, st.integers(1, 3))
def test_full_homes_pass_on_and_are_asked_to_wait_last(members, replicas):
    router = router_of(NAMES[:members], replicas)
    walk = router.write(KEYS[:5])
    last: dict[int, Target] = {}
    for _ in range(20):
        groups = walk.wave()
        if not groups:
            break
        for target, positions in groups.items():
            for position in positions:
                last[position] = target
                walk.failed(position, target, full=True)
    assert walk.wave() == {}
    assert set(last) == set(range(5))
    assert all(target.wait for target in last.values())


def test_of_two_replicas_the_one_that_should_be_done_first_is_asked():
    router = router_of(["a", "b"], replicas=2)
    for _ in range(50):
        for home, seconds in (("a", 0.1), ("b", 0.01)):
            router.paces.started(home, 1000)
            router.paces.ended(home, 1000, 0.0, seconds)
    assert set(router.read(0.0, KEYS[:1], 1000).wave()) == {"b"}
    router.paces.started("b", 50_000)  # the faster one is the busier one
    assert set(router.read(0.0, KEYS[:1], 1000).wave()) == {"a"}
    router.paces.failed("b", 50_000)
    assert set(router.read(0.0, KEYS[:1], 1000).wave()) == {"b"}


def test_a_batch_is_spread_over_equal_replicas():
    router = router_of(["a", "b", "c"], replicas=3)
    groups = router.read(0.0, KEYS[:90], 1 << 20).wave()
    assert {len(group) for group in groups.values()} == {30}


def test_the_own_share_is_preferred_while_it_is_idle():
    router = router_of(["a", "me"], replicas=2)
    assert set(router.read(0.0, KEYS[:1], 1 << 20).wave()) == {"me"}


def test_after_a_join_former_homes_are_asked_for_a_while():
    router = router_of(["a", "b"])
    router.update(10.0, equal_members(["a", "b", "c"]))
    position = next(i for i, key in enumerate(KEYS) if homes(key, router.members) == ["c"])
    key = KEYS[position : position + 1]
    walk = router.read(11.0, key, 1)
    assert not walk.single
    assert set(walk.wave()) == {"c"}
    assert list(walk.wave()) == homes(key[0], equal_members(["a", "b"]))
    assert walk.wave() == {}
    router.update(11.0 + GRACE_S, equal_members(["a", "b", "c"]))
    walk = router.read(11.0 + GRACE_S, key, 1)
    assert walk.single
    assert set(walk.wave()) == {"c"}
    assert walk.wave() == {}


def test_hot_keys_have_more_replicas_for_a_while():
    router = router_of(NAMES)
    router.heated(5.0, KEYS[0], 3)
    assert router.replicas_of(6.0, KEYS[0]) == homes(KEYS[0], router.members, 3)
    assert router.replicas_of(6.0, KEYS[1]) == homes(KEYS[1], router.members)
    assert router.replicas_of(6.0 + HOT_S, KEYS[0]) == homes(KEYS[0], router.members)
    assert router.single()


def test_no_members_are_no_candidates():
    router = router_of([], replicas=2)
    assert router.read(0.0, KEYS[:3], 1).wave() == {}
    assert router.write(KEYS[:3]).wave() == {}


def test_a_home_that_was_given_up_comes_last_for_a_while_and_is_asked_again_where_nobody_else_has_it():
    router = router_of(["a", "b"], replicas=2)
    router.paces.started("a", 1)  # so b is first
    walk = router.read(0.0, KEYS[:1], 1)
    assert set(walk.wave()) == {"b"}
    assert walk.has_others([0])
    walk.too_slow(0, "b")
    router.paces.given_up(0.0, "b", 0.1)
    assert set(walk.wave()) == {"a"}
    assert not walk.has_others([0]), "the last one is waited for"
    assert set(walk.wave()) == {"b"}, "a does not have it"
    assert walk.wave() == {}
    router.paces.started("a", 1 << 40)
    walk = router.read(0.0, KEYS[:1], 1)
    assert set(walk.wave()) == {"a"}
    assert not walk.has_others([0]), "a slow home is no better choice"
    assert set(router.read(SLOW_S, KEYS[:1], 1).wave()) == {"b"}


def test_with_one_replica_nobody_is_given_up():
    router = router_of(NAMES)
    walk = router.read(0.0, KEYS, 1)
    walk.wave()
    assert not walk.has_others(range(len(KEYS)))
    router.update(1.0, equal_members([*NAMES, "f"]))
    walk = router.read(1.0, KEYS, 1)
    assert not walk.single
    walk.wave()
    assert not any(walk.has_others([position]) for position in range(len(KEYS)))


@given(COUNTS, st.integers(1, 2), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_a_put_with_more_copies_is_found_when_as_many_homes_but_one_are_lost(members, usual, wanted, lost, agree):
    """Before the loss is known, and after it."""
    router = router_of(NAMES[:members], usual)
    walk = DecidingWalk(router, KEYS[:1], [0], wanted) if agree else router.write(KEYS[:1], wanted)
    placed = []
    while groups := walk.wave():
        for target, positions in groups.items():
            assert positions == [0] and target.owner == ""
            placed.append(target.home)
            walk.settled(0, target, STORED)
    count = min(members, max(usual, wanted))
    assert sorted(placed) == sorted(homes(KEYS[0], router.members, count))
    gone = set(homes(KEYS[0], router.members, min(lost, count - 1, usual - 1 + SPARES)))
    for members_now in (NAMES[:members], [name for name in NAMES[:members] if name not in gone]):
        read = router_of(members_now, usual).read(0.0, KEYS[:1], 1)
        found = False
        while groups := read.wave():
            (home,) = groups
            if home in gone:
                read.elsewhere(0)
            elif home in placed:
                read.found(0)
                found = True
        assert found

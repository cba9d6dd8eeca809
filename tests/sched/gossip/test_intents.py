"""A burst of one new prefix has one owner, and a wrong or lost claim costs nothing for long."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.intents import DIGEST_LAG_S, Coming, Intents, claimed_depths, home_of, ring_of

names = st.sampled_from(["a", "b", "c"])
chains = st.integers(1, 6).map(lambda count: [b"k%d" % i for i in range(count)])


def reached(coming: dict[str, Coming]) -> dict[str, int]:
    return {node: found.depth for node, found in coming.items()}


def test_a_burst_of_one_new_prefix_has_one_owner():
    intents, chain = Intents(), [b"k1", b"k2", b"k3"]
    told = [intents.claim(0.001 * i, chain, f"n{i}", ready_s=1.0) for i in range(50)]
    assert list(map(reached, told)) == [{}] + [{"n0": 3}] * 49
    assert told[-1]["n0"].ready_s == pytest.approx(1.0 - 0.049)


def test_who_shares_a_part_learns_how_much_of_it():
    intents = Intents()
    intents.claim(0.0, [b"1", b"2", b"3"], "a", 1.0)
    assert reached(intents.claim(0.1, [b"1", b"2", b"x", b"y"], "b", 1.0)) == {"a": 2}
    assert intents.claim(0.2, [b"x", b"y"], "c", 1.0) == {}, "b got nothing: it is to weigh a first"


def test_a_claim_ends_by_time_or_death():
    intents = Intents()
    intents.claim(0.0, [b"1"], "a", 1.0)
    assert intents.claim(1.5, [b"1", b"2"], "a", 1.0) == {"a": Coming(1, 0.0)}, "its own, and late"
    assert intents.claim(1.6, [b"2"], "b", 1.0) == {}, "that was no claim"
    intents.drop("a")
    assert len(intents) == 1 and intents.claim(1.7, [b"1"], "c", 1.0) == {}
    assert reached(intents.claim(1.6 + 2.0 + DIGEST_LAG_S - 0.01, [b"2"], "d", 1.0)) == {"b": 1}
    assert intents.claim(1.6 + 2.0 + DIGEST_LAG_S, [b"2"], "d", 1.0) == {}


def test_who_takes_another_node_in_the_end_claims_for_that():
    intents = Intents()
    intents.claim(0.0, [b"1", b"2"], "a", 1.0)
    assert intents.claim(0.1, [b"1", b"2"], "b", 1.0, instead_of="a") == {}
    assert reached(intents.claim(0.2, [b"1"], "c", 1.0)) == {"b": 1}


def test_a_full_table_grants_without_noting():
    intents = Intents(capacity=2)
    assert intents.claim(0.0, [b"1", b"2", b"3"], "a", 0.0) == {}
    assert len(intents) == 2 and intents.claim(0.1, [b"3"], "b", 0.0) == {}
    assert intents.claim(5.0, [b"4"], "b", 0.0) == {} and reached(intents.claim(5.1, [b"4"], "c", 0.0)) == {"b": 1}


def test_a_claim_that_was_ready_before_is_refused():
    with pytest.raises(ValueError, match="ready"):
        Intents().claim(0.0, [b"1"], "a", -1.0)


@seed(1)
@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), names, chains, st.booleans()), max_size=30))
def test_a_key_is_claimed_by_one_node_at_a_time_and_only_when_nobody_has_any(operations):
    intents, model, now = Intents(), {}, 0.0
    for wait, name, chain, dies in operations:
        now += wait
        model = {key: claim for key, claim in model.items() if claim[1] > now}
        if dies:
            intents.drop(name)
            model = {key: claim for key, claim in model.items() if claim[0] != name}
            continue
        expected = {model[key][0]: depth for depth, key in enumerate(chain, 1) if key in model}
        assert reached(intents.claim(now, chain, name, 0.7)) == expected
        if not expected:
            model |= dict.fromkeys(chain, (name, now + 2 * 0.7 + DIGEST_LAG_S))


@seed(2)
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_two_chains_that_part_find_how_much_they_share_to_a_sixth(known, shared, more):
    longer, other = claimed_depths(known, shared + more), claimed_depths(0, shared)
    assert longer == sorted(set(longer)) and len(longer) < 50
    assert all(known < depth <= shared + more for depth in longer)
    assert not longer or longer[-1] == shared + more
    both = set(longer) & set(other) - {shared}
    if shared > max(known, 10):
        assert not both or max(both) >= shared - shared / 5 - 1


@seed(3)
@given(st.sets(st.text(min_size=1, max_size=5), min_size=1, max_size=20), st.binary(min_size=16, max_size=16))
def test_all_find_the_same_home_and_losing_another_node_does_not_move_it(nodes, key):
    home = home_of(key, ring_of(nodes))
    assert home in nodes and home == home_of(key, ring_of(sorted(nodes, reverse=True)))
    for gone in nodes - {home}:
        assert home_of(key, ring_of(nodes - {gone})) == home

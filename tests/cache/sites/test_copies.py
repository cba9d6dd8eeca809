"""Copies of blocks of other sites: admission by the second hit, and a time to live that reads renew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache.sites.copies import ExpiringCopies, SecondHit

TTL_S = 10.0
keys = st.sampled_from([b"a", b"b", b"c", b"d"])


@given(st.lists(st.tuples(st.floats(0.0, 15.0), st.lists(keys, max_size=4, unique=True)), max_size=40))
def test_a_block_becomes_a_copy_when_it_crosses_twice_within_the_time_to_live(crossings):
    rules, now, last = SecondHit[bytes](TTL_S), 0.0, {}
    for pause, wanted in crossings:
        now += pause
        expected = [key in last and now - last[key] < TTL_S for key in wanted]
        assert rules.crossed(now, wanted) == expected
        last |= dict.fromkeys(wanted, now)


def test_first_hits_are_remembered_up_to_a_bound_the_newest_ones():
    rules = SecondHit[int](TTL_S, keys_max=3)
    assert rules.crossed(0.0, [1, 2, 3, 4, 5]) == [False] * 5
    assert len(rules) == 3
    assert rules.crossed(1.0, [1, 5]) == [False, True]


def test_a_block_that_is_computed_here_has_not_crossed():
    rules = SecondHit[int](TTL_S)
    rules.crossed(0.0, [1, 2])
    assert 1 in rules and 2 in rules and 3 not in rules
    rules.forget([1, 3])
    assert 1 not in rules and 2 in rules
    assert rules.crossed(1.0, [1, 2]) == [False, True]


@pytest.mark.parametrize(("ttl_s", "most"), [(0.0, 5), (-1.0, 5), (1.0, 0)])
def test_rules_that_admit_nothing_are_refused(ttl_s, most):
    with pytest.raises(ValueError, match="time to live"):
        SecondHit[int](ttl_s, most)


class Home(RuleBasedStateMachine):
    """ExpiringCopies against a model that keeps the end of every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = ExpiringCopies[bytes]()
        self.now = 0.0
        self.model: dict[bytes, tuple[float, float]] = {}

    @rule(key=keys, ttl_s=st.floats(0.5, 20.0))
    def arrive(self, key, ttl_s):
        self.copies.arrived(self.now, [key], ttl_s)
        end, longest_s = self.model.get(key, (0.0, 0.0))
        self.model[key] = (max(end, self.now + ttl_s), max(longest_s, ttl_s))

    @rule(key=keys)
    def compute(self, key):
        self.copies.own([key])
        self.model.pop(key, None)

    @rule(key=keys)
    def read(self, key):
        self.copies.used(self.now, [key])
        if key in self.model and self.now < self.model[key][0]:
            ttl_s = self.model[key][1]
            self.model[key] = (self.now + ttl_s, ttl_s)

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def sweep(self):
        over = {key for key, (end, _) in self.model.items() if end <= self.now}
        found = self.copies.expired(self.now)
        assert set(found) == over
        assert len(found) == len(over)
        for key in over:
            del self.model[key]

    @invariant()
    def counts_agree(self):
        assert len(self.copies) == len(self.model)


TestHome = Home.TestCase
TestHome.settings = settings(max_examples=60, stateful_step_count=40)

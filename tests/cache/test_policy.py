"""Eviction policies against slow models of themselves."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from cache.policy import FIFO, LRU, policies


class LRUModel(RuleBasedStateMachine):
    """Drives the policy through legal lives; `order` is a plain list, next victim first."""

    free = Bundle("free")
    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.policy = LRU()
        self.order = []
        self.in_use = set()
        self.count = 0

    def used(self, item):
        self.order.remove(item)
        self.order.append(item)

    @rule(target=free)
    def add(self):
        self.count += 1
        self.policy.added(self.count)
        self.order.append(self.count)
        return self.count

    @rule(item=free)
    def touch(self, item):
        self.policy.touched(item)
        self.used(item)

    @rule(item=pinned)
    def touch_pinned(self, item):
        self.policy.touched(item)

    @rule(target=pinned, item=consumes(free))
    def pin(self, item):
        self.policy.pinned(item)
        self.in_use.add(item)
        return item

    @rule(target=free, item=consumes(pinned))
    def unpin(self, item):
        self.policy.unpinned(item)
        self.in_use.discard(item)
        self.used(item)
        return item

    @rule(item=st.one_of(consumes(free), consumes(pinned)))
    def remove(self, item):
        self.policy.removed(item)
        self.order.remove(item)
        self.in_use.discard(item)

    @precondition(lambda self: any(item not in self.in_use for item in self.order))
    @rule()
    def next_victim(self):
        assert self.policy.victim() == next(item for item in self.order if item not in self.in_use)

    @precondition(lambda self: all(item in self.in_use for item in self.order))
    @rule()
    def no_victim(self):
        with pytest.raises(LookupError):
            self.policy.victim()

    @invariant()
    def counts(self):
        assert len(self.policy) == sum(item not in self.in_use for item in self.order)


TestLRU = LRUModel.TestCase


def test_fifo_ignores_use():
    fifo = FIFO()
    for item in "abc":
        fifo.added(item)
    fifo.touched("a")
    fifo.pinned("b")
    fifo.unpinned("b")
    assert fifo.victim() == "a"


def test_fifo_returns_an_old_item_that_was_in_use_at_its_turn():
    fifo = FIFO()
    for item in "abc":
        fifo.added(item)
    fifo.pinned("a")
    assert fifo.victim() == "b"
    assert len(fifo) == 2
    fifo.unpinned("a")
    assert fifo.victim() == "a"
    assert len(fifo) == 3


def test_fifo_forgets_a_removed_item_everywhere():
    fifo = FIFO()
    fifo.added("a")
    fifo.pinned("a")
    with pytest.raises(LookupError):
        fifo.victim()
    fifo.removed("a")
    assert len(fifo) == 0
    fifo.added("a")
    assert fifo.victim() == "a"


def test_the_table_of_policies():
    assert {name: type(make()) for name, make in policies.items()} == {"lru": LRU, "fifo": FIFO}

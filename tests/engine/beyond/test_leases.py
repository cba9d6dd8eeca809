"""Leases on blocks, on a virtual clock: every one ends, and no block is lent twice or freed while it is used."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.beyond.leases import Lease, Leases, LeasesFull, NoLease


def test_silence_ends_a_lease_and_words_keep_it():
    leases = Leases(10, lease_s=30)
    first, second = leases.grant("a", 1, 4, 0.0), leases.grant("a", 2, 4, 0.0)
    assert leases.left == 2 and leases.next_end() == 30.0
    with pytest.raises(LeasesFull, match="3 blocks are asked for; of the 10 that may be lent, 8 are lent"):
        leases.grant("b", 1, 3, 1.0)
    leases.keep("a", [1, 7], 20.0)
    assert leases.expire(29.9) == [] and leases.expire(30.0) == [second]
    assert leases.expire(49.9) == [] and leases.expire(50.0) == [first] and leases.left == 10
    assert leases.expired == 2 and leases.next_end() is None
    with pytest.raises(NoLease, match="a has no lease 1 here"):
        leases.use("a", 1, 51.0)


def test_blocks_in_use_are_freed_behind_the_computation():
    leases = Leases(10)
    lease = leases.grant("a", 1, 4, 0.0)
    assert leases.use("a", 1, 1.0) is lease and leases.use("a", 1, 1.0) is lease
    assert leases.expire(1e9) == [], "who computes is alive"
    assert leases.lost("a") == [] and leases.lent == 4 and not len(leases)
    assert leases.done(lease) == [] and leases.done(lease) == [lease] and leases.lent == 0


def test_a_lease_is_its_owners():
    leases = Leases(10)
    leases.grant("a", 1, 4, 0.0)
    with pytest.raises(NoLease):
        leases.use("b", 1, 0.0)
    assert leases.release("b", [1]) == [] and leases.lost("b") == []
    with pytest.raises(ValueError, match="a has lease 1 already"):
        leases.grant("a", 1, 1, 0.0)


class Life(RuleBasedStateMachine):
    """Owners, computations, losses and time in any order."""

    @initialize(most=st.integers(0, 20))
    def begin(self, most: int) -> None:
        self.now, self.leases, self.most = 0.0, Leases(most, lease_s=10), most
        self.open: dict[tuple[str, int], Lease] = {}
        self.running: list[Lease] = []
        self.freed: list[Lease] = []
        self.all: list[Lease] = []

    def free(self, leases: list[Lease]) -> None:
        for lease in leases:
            assert not any(lease is one for one in self.freed), "freed twice"
            assert not lease.using and lease.ended
            self.freed.append(lease)

    @rule(owner=st.sampled_from("ab"), number=st.integers(0, 3), blocks=st.integers(1, 8))
    def grant(self, owner: str, number: int, blocks: int) -> None:
        held = sum(one.blocks for one in self.all if not any(one is freed for freed in self.freed))
        try:
            lease = self.leases.grant(owner, number, blocks, self.now)
        except LeasesFull:
            assert held + blocks > self.most
        except ValueError:
            assert (owner, number) in self.open
        else:
            self.open[owner, number] = lease
            self.all.append(lease)

    @rule(owner=st.sampled_from("ab"), number=st.integers(0, 3))
    def use(self, owner: str, number: int) -> None:
        try:
            self.running.append(self.leases.use(owner, number, self.now))
        except NoLease:
            assert (owner, number) not in self.open
        else:
            assert self.open[owner, number] is self.running[-1]

    @rule(which=st.integers(0, 9))
    def done(self, which: int) -> None:
        if self.running:
            self.free(self.leases.done(self.running.pop(which % len(self.running))))

    @rule(owner=st.sampled_from("ab"), number=st.integers(0, 3))
    def release(self, owner: str, number: int) -> None:
        self.open.pop((owner, number), None)
        self.free(self.leases.release(owner, [number]))

    @rule(owner=st.sampled_from("ab"))
    def lost(self, owner: str) -> None:
        self.open = {key: lease for key, lease in self.open.items() if key[0] != owner}
        self.free(self.leases.lost(owner))

    @rule(seconds=st.integers(0, 12), kept=st.booleans())
    def wait(self, seconds: int, kept: bool) -> None:
        if kept:
            for owner, number in self.open:
                self.leases.keep(owner, [number], self.now)
        self.now += seconds
        self.free(self.leases.expire(self.now))
        late = {key for key, lease in self.open.items() if lease.until <= self.now and not lease.using}
        assert not (kept and seconds < 10 and late)
        self.open = {key: lease for key, lease in self.open.items() if key not in late}

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "leases"):
            return
        held = sum(one.blocks for one in self.all if not any(one is freed for freed in self.freed))
        assert self.leases.lent == held <= self.most and self.leases.left >= 0
        assert len(self.leases) == len(self.open)

    def teardown(self) -> None:
        if hasattr(self, "leases"):
            while self.running:
                self.free(self.leases.done(self.running.pop()))
            self.free(self.leases.expire(self.now + 1000))
            assert self.leases.lent == 0 and len(self.freed) == len(self.all)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
